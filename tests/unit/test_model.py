import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from dmuon_platform.errors import SpecError
from dmuon_platform.model import (
    build_model,
    flops_per_token,
    hf_config,
    is_hidden,
    layer_modules,
    next_token_loss,
    vocabulary_size,
)


@dataclass(frozen=True)
class Settings:
    name: str = "llama"
    path: str | None = None
    vocab_size: int = 61
    hidden_size: int = 32
    intermediate_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.2  # large, so that equal logits mean something


SHAPES = pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(num_key_value_heads=2),
        Settings(num_key_value_heads=1, tie_word_embeddings=True, rope_theta=5e5),
    ],
    ids=["plain", "grouped", "multi-query-tied"],
)


def tokens(num_sequences: int = 3, length: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 61, (num_sequences, length), generator=generator)


def save(model: torch.nn.Module, config: dict[str, object], folder: Path) -> None:
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@SHAPES
def test_our_weights_open_in_transformers_with_equal_logits(settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build_model(settings, sequence_length=32)
    save(model, hf_config(settings, 32), tmp_path)

    theirs, loading = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )

    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    expected = theirs(input_ids=tokens()).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model(tokens()).logits, expected, atol=1e-5, rtol=1e-5)


@SHAPES
def test_weights_of_transformers_open_here_with_equal_logits(settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(settings, 32)))

    model = build_model(settings, sequence_length=32)
    model.load_state_dict(theirs.state_dict(), strict=True)

    torch.testing.assert_close(
        model(tokens()).logits, theirs(input_ids=tokens()).logits, atol=1e-5, rtol=1e-5
    )


def test_the_config_names_no_byte_as_the_end_of_a_text():
    config = hf_config(Settings(), 32)
    assert config["eos_token_id"] is None
    assert hf_config(Settings(), 32, separator_id=60)["eos_token_id"] == 60


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_on_meta_has_shapes_only_and_can_be_filled_later(tied):
    settings = Settings(tie_word_embeddings=tied)
    model = build_model(settings, 32, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())

    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.initialise()
    torch.manual_seed(5)
    direct = build_model(settings, 32)

    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    torch.testing.assert_close(model.state_dict(), direct.state_dict(), atol=0, rtol=0)


def test_a_new_model_predicts_nothing_in_particular():
    torch.manual_seed(0)
    model = build_model(Settings(initializer_range=0.02), 32)
    loss = next_token_loss(model, tokens())
    assert loss.item() == pytest.approx(torch.log(torch.tensor(61.0)).item(), abs=0.1)


def test_labels_are_the_tokens_that_follow():
    model = build_model(Settings(), 32)
    batch = tokens()
    inside = model(batch[:, :-1], batch[:, 1:]).loss
    torch.testing.assert_close(inside, next_token_loss(model, batch))


def test_no_position_sees_what_comes_after_it():
    model = build_model(Settings(), 32)
    batch = tokens()
    changed = batch.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    torch.testing.assert_close(model(batch).logits[:, :10], model(changed).logits[:, :10])
    assert not torch.allclose(model(batch).logits[:, 10:], model(changed).logits[:, 10:])


def test_hidden_matrices_are_those_of_the_blocks():
    model = build_model(Settings(), 32)
    hidden = {name for name, param in model.named_parameters() if is_hidden(name, param)}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-2] for name in hidden} == projections
    assert len(hidden) == 2 * len(projections)
    assert layer_modules(model) == list(model.model.layers)


def test_flops_count_each_multiplying_weight_once():
    settings = Settings()
    blocks = 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    head = 61 * 32
    attention = 6 * 2 * 32 * 128
    assert flops_per_token(settings, 128) == 6 * (blocks + head) + attention
    tied = dataclasses.replace(settings, tie_word_embeddings=True)
    assert flops_per_token(tied, 128) == flops_per_token(settings, 128)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (Settings(hidden_size=36), "multiple of 8"),
        (Settings(num_key_value_heads=3), r"\[1, 2, 4\]"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(wrong, named):
    with pytest.raises(SpecError, match=named):
        build_model(wrong, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**hf_config(Settings(), 32))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_local_folder_is_trained_from_its_weights(folder):
    transformers = pytest.importorskip("transformers")
    settings = Settings(path=str(folder))
    model = build_model(settings, 32)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)

    assert vocabulary_size(settings) == 61
    assert len(layer_modules(model)) == 2
    torch.testing.assert_close(model.state_dict(), theirs.state_dict(), atol=0, rtol=0)
    expected = theirs(input_ids=tokens(), labels=tokens()).loss
    torch.testing.assert_close(next_token_loss(model, tokens()), expected)
    assert hf_config(settings, 32)["hidden_size"] == 32


def test_a_local_folder_without_weights_is_built_for_a_checkpoint_to_fill(folder):
    (folder / "model.safetensors").unlink()
    settings = Settings(path=str(folder))
    assert build_model(settings, 32)(input_ids=tokens()).logits.shape == (3, 17, 61)
    assert all(p.is_meta for p in build_model(settings, 32, device="meta").parameters())
    assert flops_per_token(settings, 32) == flops_per_token(Settings(), 32)


def test_a_model_that_came_in_bfloat16_is_float32_to_whoever_opens_it_next(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    config = hf_config(Settings(path=str(tmp_path)), 32)
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")
    assert config["model_type"] == "llama"


def saved(config: object, folder: Path) -> Settings:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Settings(path=str(folder))


def test_sequences_beyond_a_table_of_positions_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "n_positions": transformers.GPT2Config(n_positions=32, **sizes),
        "max_position_embeddings": transformers.OPTConfig(
            max_position_embeddings=32, word_embed_proj_dim=16, ffn_dim=16, **sizes
        ),
        "max_seq_len": transformers.MptConfig(
            max_seq_len=32, vocab_size=61, d_model=16, n_heads=2, n_layers=1
        ),
    }
    for key, config in configs.items():
        settings = saved(config, tmp_path / key)
        with pytest.raises(SpecError, match=rf"at most 32 tokens \({key} in"):
            build_model(settings, 33, device="meta")
        build_model(settings, 32)(input_ids=tokens(2, 32))
        with pytest.raises((IndexError, RuntimeError)):  # so it is right to refuse it
            build_model(settings, 32)(input_ids=tokens(2, 33))
    bare = json.loads((tmp_path / "n_positions" / "config.json").read_text())
    del bare["n_positions"]
    (tmp_path / "n_positions" / "config.json").write_text(json.dumps(bare))
    with pytest.raises(SpecError, match="at most 1024 tokens"):  # what transformers then takes
        build_model(Settings(path=str(tmp_path / "n_positions")), 1025, device="meta")


def test_plain_rotary_positions_go_on_and_the_export_says_how_far(folder):
    settings = Settings(path=str(folder))
    assert build_model(settings, 64)(input_ids=tokens(2, 64)).logits.shape == (2, 64, 61)
    assert hf_config(settings, 64)["max_position_embeddings"] == 64
    assert hf_config(settings, 16)["max_position_embeddings"] == 32
    config = json.loads((folder / "config.json").read_text())
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config |= {"rope_parameters": scaled, "rope_scaling": scaled}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"Set data\.sequence_length=32 or less"):
        build_model(settings, 64, device="meta")


def test_a_folder_that_is_no_model_is_refused(tmp_path, folder):
    with pytest.raises(SpecError, match="nowhere: there is no such folder"):
        build_model(Settings(path=str(tmp_path / "nowhere")), 32)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "vocab_size": 3}')
    with pytest.raises(SpecError, match="does not open"):
        build_model(Settings(path=str(tmp_path)), 32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="as JSON"):
        vocabulary_size(Settings(path=str(tmp_path)))


def test_without_transformers_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SpecError, match=r"dmuon\[hf\]"):
        build_model(Settings(path=str(folder)), 32)
