"""Models of the transformers library, tiny and never downloaded, against one process."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks_runner import run_ranks
from tiny import FormulaMuon
from torch import nn
from torch.distributed.fsdp import fully_shard
from wrapped import make_mesh

import dmuon

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 41}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def qwen3() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SMALL, **HEADS, head_dim=8, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=41, n_positions=16, **options
    )
    return transformers.GPT2LMHeadModel(config)


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def wrap(model: nn.Module, *shape: int) -> nn.Module:
    mesh = make_mesh(*shape)
    dmuon.dedicate_params(model, mesh)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 41, (8, 12), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), qwen3, gpt2])
def test_training_equals_one_process(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        alone = make()
        start = copy.deepcopy(alone.state_dict())
        model = wrap(copy.deepcopy(alone), *shape)
        dedicated = set(dmuon.get_dedicated_params(model))
        assert len(dedicated) == (8 if hasattr(model, "transformer") else 14)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        formula = FormulaMuon(
            alone,
            is_muon=lambda name, param: name in dedicated,
            coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]),
        )
        world_size = int(torch.tensor(shape).prod())
        for step in range(3):
            rows = batch(step)
            part = rows.chunk(world_size)[rank]
            model(input_ids=part, labels=part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            alone(input_ids=rows, labels=rows).loss.backward()
            formula.step()
        state = dmuon.get_model_state_dict(model)
        assert list(state) == list(alone.state_dict())
        for name, value in alone.state_dict().items():
            change, off = (value - start[name]).norm(), (state[name] - value).norm()
            assert off <= 1e-3 * change + 1e-6, f"{name}: changed by {change}, off by {off}"

    run_ranks(int(torch.tensor(shape).prod()), body)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_pretrained_folder_loads_exactly_and_our_dict_opens_again(
    tmp_path: Path, tied: bool
) -> None:
    from safetensors.torch import load_file

    original = llama(tied)
    original.save_pretrained(tmp_path / "given")

    def body(rank: int) -> None:
        torch.manual_seed(1)
        model = wrap(transformers.LlamaForCausalLM(original.config), 2)
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
            logits = model(input_ids=batch(0)).logits
            torch.testing.assert_close(logits, original(input_ids=batch(0)).logits)

    run_ranks(2, body)
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        expected = original(input_ids=batch(0)).logits
        assert torch.equal(opened(input_ids=batch(0)).logits, expected)
