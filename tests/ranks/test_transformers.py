"""Decoders of the transformers library, tiny and never downloaded, against one process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import Batch, Training, assert_equals_one_process
from ranks_runner import run_ranks
from torch import nn

import dmuon

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs the hf extra")

VOCAB = 41
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
INIT = {"initializer_range": 0.2}  # with 0.02 attention is flat: gradients of queries are rounding


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(**WIDTHS, **HEADS, **INIT, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def tied_llama() -> nn.Module:
    return llama(tied=True)


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(
        **WIDTHS, **HEADS, **INIT, head_dim=8, tie_word_embeddings=True
    )
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> nn.Module:
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=16, **options, **INIT
    )
    return transformers.GPT2LMHeadModel(config)


def layers_of(model: Any) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def batch(step: int) -> Batch:
    rows = torch.randint(0, VOCAB, (8, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": rows, "labels": rows}


Make = Callable[[], nn.Module]


def training(make: Make) -> Training:
    return Training(make, batch, layers_of)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("make", [llama, tied_llama, qwen3, gpt2])
def test_training_equals_one_process(make: Make, shape: tuple[int, ...], reshard: bool) -> None:
    assert_equals_one_process(training(make), shape, reshard)


def fused(name: str, param: nn.Parameter) -> dmuon.Split | None:
    return dmuon.Split((32, 32, 32), dim=1) if name.endswith("c_attn.weight") else None


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_a_fused_projection_whose_parts_are_declared(shape: tuple[int, ...]) -> None:
    assert_equals_one_process(Training(gpt2, batch, layers_of, splits=fused), shape)


@pytest.mark.parametrize(("make", "num"), [(llama, 14), (tied_llama, 14), (qwen3, 14), (gpt2, 8)])
def test_the_matrices_of_every_layer_and_nothing_else_have_owners(make: Make, num: int) -> None:
    def body(rank: int) -> None:
        names = dmuon.get_dedicated_params(training(make).wrap((1,)))
        layers = [name for name in names if ".h." in name or ".layers." in name]
        assert len(names) == len(layers) == num

    run_ranks(1, body)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize(("shape", "reshard"), [((2,), False), ((2, 2), True)], ids=str)
@pytest.mark.parametrize("make", [tied_llama, gpt2])
def test_checkpointed_layers_equal_one_process(
    make: Make, shape: tuple[int, ...], reshard: bool, reentrant: bool
) -> None:
    def checkpointed() -> nn.Module:
        model = make()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        assert all(layer.gradient_checkpointing for layer in layers_of(model))
        return model

    assert_equals_one_process(training(checkpointed), shape, reshard)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_pretrained_folder_loads_exactly_and_our_dict_opens_again(
    tmp_path: Path, tied: bool
) -> None:
    from safetensors.torch import load_file

    original = llama(tied)
    fresh = llama(tied)  # other random weights
    original.save_pretrained(tmp_path / "given")

    def body(rank: int) -> None:
        model = Training(lambda: fresh, batch, layers_of).wrap((2,))
        given = load_file(tmp_path / "given" / "model.safetensors")
        if tied:  # the folder holds a tied weight once
            given["lm_head.weight"] = given["model.embed_tokens.weight"]
        dmuon.set_model_state_dict(model, given)
        state = dmuon.get_model_state_dict(model)
        if rank == 0:
            again = transformers.LlamaForCausalLM(original.config)
            again.load_state_dict(state, strict=True)
            again.save_pretrained(tmp_path / "ours")
        with torch.no_grad():
            logits = model(input_ids=batch(0)["input_ids"]).logits
            torch.testing.assert_close(logits, original(input_ids=batch(0)["input_ids"]).logits)

    run_ranks(2, body)
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        expected = original(input_ids=batch(0)["input_ids"]).logits
        assert torch.equal(opened(input_ids=batch(0)["input_ids"]).logits, expected)
