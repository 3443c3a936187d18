"""Text to token ids and back."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dmuon_platform.errors import SpecError
from dmuon_platform.spec.user_path import user_path, where_from

BYTES = "bytes"
TOKENIZER_FILE = "tokenizer.json"
SEPARATOR = "<|endoftext|>"
_OTHER_FORMS = ("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt")
_BESIDE = (
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
)
"""What else belongs to a ``tokenizer.json`` as ``transformers`` saves it."""
_KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>")


class TextTokenizer(Protocol):
    """What the data package needs of a tokenizer; picklable, since Ray sends it to its tasks."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def separator_id(self) -> int | None:
        """The token put after each document, or None when the vocabulary has none."""

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """Return the token ids of UTF-8 text, without special tokens."""

    def to_json(self) -> str:
        """Return the ``tokenizer.json`` that gives the same ids in ``transformers``."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte, and between documents byte 255, which UTF-8 never uses: 256 tokens."""

    vocab_size: int = 256
    separator_id: int | None = 255

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """Return the bytes themselves."""
        return np.frombuffer(text, np.uint8).astype(np.uint32)

    def to_json(self) -> str:
        """Return a byte-level BPE without merges, whose ids are the byte values."""
        names = [*_byte_characters()[:255], SEPARATOR]
        vocab = {name: value for value, name in enumerate(names)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
        return tokenizer.to_str(pretty=True)


@dataclass(frozen=True)
class FileTokenizer:
    """A ``tokenizer.json`` of the `tokenizers` package, as text."""

    text: str

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.text)

    def __reduce__(self) -> tuple[type["FileTokenizer"], tuple[str]]:
        return type(self), (self.text,)  # each process parses it once for itself

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; vocabularies may have holes."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def separator_id(self) -> int | None:
        """The first end-of-text token of a usual name that the vocabulary has."""
        ids = (self._tokenizer.token_to_id(name) for name in _KNOWN_SEPARATORS)
        return next((each for each in ids if each is not None), None)

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        """Return the token ids of UTF-8 text, without special tokens."""
        encoding = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    def to_json(self) -> str:
        """Return the file's text."""
        return self.text


def load_tokenizer(name: str) -> TextTokenizer:
    """Return the tokenizer that ``data.tokenizer`` names.

    Raises:
        SpecError: It is neither ``"bytes"`` nor a readable ``tokenizer.json``.
    """
    return ByteTokenizer() if name == BYTES else _read(name)


def _read(name: str) -> FileTokenizer:
    path = user_path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        where = where_from(path) if isinstance(error, FileNotFoundError) else ""
        raise SpecError(
            f"data.tokenizer: {name!r} cannot be read ({why}){where}. It is {BYTES!r} or the path "
            "of a tokenizer.json."
        ) from error
    tokenizer = FileTokenizer(text)
    try:
        num_tokens = tokenizer.vocab_size
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise SpecError(
            f"data.tokenizer: {name!r} is not a tokenizer.json of the `tokenizers` package: {error}"
        ) from error
    if num_tokens == 0:
        raise SpecError(f"data.tokenizer: {name!r} has an empty vocabulary.")
    return tokenizer


def check_vocabulary(
    name: str, tokenizer: TextTokenizer, vocab_size: int, model_path: str | None = None
) -> None:
    """Refuse a model that does not know every token.

    Args:
        name: What ``data.tokenizer`` says.
        tokenizer: What that names.
        vocab_size: Token ids that the model knows.
        model_path: The folder it comes from, whose sizes are given.

    Raises:
        SpecError: ``vocab_size`` is smaller than the tokenizer's.
    """
    needed = tokenizer.vocab_size
    if vocab_size >= needed:
        return
    if model_path is not None:
        raise SpecError(
            f"data.tokenizer = {name!r} has {needed} tokens, but the model in {model_path} "
            f"(model.path) knows {vocab_size}. Name that model's own tokenizer.json, or have it "
            "in that folder and leave data.tokenizer out."
        )
    raise SpecError(
        f"data.tokenizer = {name!r} has {needed} tokens, but model.vocab_size is {vocab_size}. "
        f"Set model.vocab_size to at least {needed}."
    )


def check_pretrained(name: str, tokenizer: TextTokenizer, folder: Path) -> None:
    """Refuse to train a model that was trained with another tokenizer.

    Either may know more tokens than the other; those of both must have the same ids.

    Raises:
        SpecError: The ``tokenizer.json`` in the model's folder gives other ids.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return
    ours = Tokenizer.from_str(tokenizer.to_json()).get_vocab().items()
    theirs = Tokenizer.from_str(_read(str(file)).text).get_vocab().items()
    if not (ours <= theirs or ours >= theirs):
        raise SpecError(
            f"data.tokenizer = {name!r} gives other ids than {file}, with which model.path was "
            f"trained: it would read other text than it knows. Set data.tokenizer = {str(file)!r}; "
            "to train it on other tokens on purpose, take that file out of the folder."
        )


def check_has_tokenizer(folder: Path) -> None:
    """Refuse to take bytes in silence for a model that was trained with another tokenizer.

    Raises:
        SpecError: The model's folder has no ``tokenizer.json``.
    """
    if (folder / TOKENIZER_FILE).is_file():
        return
    others = [name for name in _OTHER_FORMS if (folder / name).is_file()]
    if others:
        raise SpecError(
            f"data.tokenizer is not set, and {folder} (model.path) has no {TOKENIZER_FILE}, but "
            f"{' and '.join(others)}. Make the file of these, with `transformers`: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}); or "
            f"set data.tokenizer to a {TOKENIZER_FILE} elsewhere."
        )
    raise SpecError(
        f"data.tokenizer is not set, and {folder} (model.path) has no {TOKENIZER_FILE}. Put that "
        "of the model there, or set data.tokenizer to its path; for a model whose tokens are "
        f"bytes, write data.tokenizer = {BYTES!r} (for `dmuon init`: --tokenizer bytes)."
    )


def files_beside(name: str) -> list[Path]:
    """Return the files that belong to the ``tokenizer.json`` that ``data.tokenizer`` names.

    Beside a file of another name lies what may belong to another tokenizer.
    """
    file = user_path(name)
    if name == BYTES or file.name != TOKENIZER_FILE:
        return []
    return sorted(each for glob in _BESIDE for each in file.parent.glob(glob) if each.is_file())


def tokenizer_files(tokenizer: TextTokenizer) -> dict[str, bytes]:
    """Return the files that make `transformers.AutoTokenizer` this tokenizer, by name."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.separator_id is not None:
        separator = Tokenizer.from_str(tokenizer.to_json()).id_to_token(tokenizer.separator_id)
        config |= {"eos_token": separator, "bos_token": separator}
    return {
        TOKENIZER_FILE: tokenizer.to_json().encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE (GPT-2) writes for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
