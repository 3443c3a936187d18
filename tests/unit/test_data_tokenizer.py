import pickle

import numpy as np
import pytest
from dmuon_platform.data import ByteTokenizer, FileTokenizer, load_tokenizer
from dmuon_platform.data.tokenizer import check_pretrained, check_vocabulary, tokenizer_files
from dmuon_platform.errors import SpecError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = "def f(x):\n\treturn 'ä三😀' + x  # \x00\x7f<|endoftext|>\n"


@pytest.fixture
def bpe_file(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the hat"] * 5, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_byte_tokens_are_the_bytes():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == 256
    assert tokenizer.separator_id == 255
    assert bytes(tokenizer.encode(TEXT.encode()).tolist()) == TEXT.encode()


def test_the_byte_tokenizer_is_the_same_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, content in tokenizer_files(ByteTokenizer()).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = TEXT.replace("<|endoftext|>", "")
    assert theirs(plain)["input_ids"] == list(plain.encode())
    assert theirs.decode(list(plain.encode())) == plain
    assert theirs.eos_token_id == 255
    assert len(theirs) == 256


def test_a_file_is_read_with_its_separator(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    assert tokenizer.separator_id == 1
    assert tokenizer.vocab_size == Tokenizer.from_file(str(bpe_file)).get_vocab_size()
    expected = Tokenizer.from_file(str(bpe_file)).encode("the cat ä").ids
    assert tokenizer.encode("the cat ä".encode()).tolist() == expected
    assert tokenizer.encode(b"the").dtype == np.uint32


def test_a_tokenizer_travels_between_processes_also_after_use(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    ids = tokenizer.encode(b"the cat").tolist()
    assert pickle.loads(pickle.dumps(tokenizer)).encode(b"the cat").tolist() == ids


def test_its_file_is_exported_with_its_end_token(bpe_file):
    files = tokenizer_files(load_tokenizer(str(bpe_file)))
    assert files["tokenizer.json"] == bpe_file.read_bytes()
    assert b'"eos_token": "</s>"' in files["tokenizer_config.json"]


def test_a_model_that_does_not_know_every_token_is_refused(bpe_file):
    with pytest.raises(SpecError, match=r"has 256 tokens.* Set model\.vocab_size to at least 256"):
        check_vocabulary("bytes", ByteTokenizer(), 255)
    check_vocabulary("bytes", ByteTokenizer(), 256)
    tokenizer = load_tokenizer(str(bpe_file))
    with pytest.raises(SpecError, match=f"at least {tokenizer.vocab_size}"):
        check_vocabulary(str(bpe_file), tokenizer, 256)


def test_a_model_of_another_tokenizer_is_refused(bpe_file, tmp_path):
    model, trained_with = tmp_path / "model", load_tokenizer(str(bpe_file))
    model.mkdir()
    check_pretrained("bytes", ByteTokenizer(), model)  # a folder without one says nothing
    file = model / "tokenizer.json"
    file.write_text(trained_with.to_json())
    with pytest.raises(SpecError, match=r"data\.tokenizer = 'bytes' gives other ids") as caught:
        check_pretrained("bytes", ByteTokenizer(), model)
    assert f"Set data.tokenizer = {str(file)!r}" in str(caught.value)
    check_pretrained(str(bpe_file), trained_with, model)
    more = Tokenizer.from_file(str(file))
    more.add_tokens(["an added word"])
    check_pretrained("more", FileTokenizer(more.to_str()), model)
    file.write_text(ByteTokenizer().to_json())
    check_pretrained("bytes", ByteTokenizer(), model)


def test_a_vocabulary_with_holes_counts_to_its_largest_id():
    text = Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a")).to_str()
    assert FileTokenizer(text).vocab_size == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{}", r"not a tokenizer\.json"), ("hello", "not a tokenizer")],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=message):
        load_tokenizer(str(path))
