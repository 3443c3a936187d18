"""Hugging Face's library opens what is written here, and what it writes is read here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.checkpoint_builders import write

from dmuon.checkpoint.assignment import Item, assign
from dmuon.checkpoint.durable_file import write_file
from dmuon.checkpoint.facts import facts_of
from dmuon.checkpoint.index_file import INDEX_FILE, index_json, read_index
from dmuon.checkpoint.source import Source, open_source

transformers = pytest.importorskip("transformers", reason="needs the hf extra")


def tiny_llama(tied: bool) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    ).eval()


def write_model(folder: Path, model: Any, num_writers: int) -> dict[str, Tensor]:
    """As ranks do it: everybody their share, then the index and the config."""
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight
    items = [Item(name, "model", tensor.nbytes) for name, tensor in tensors.items()]
    plan = assign(items, num_writers)
    by_file = {}
    for (section, writer), file in plan.files.items():
        share = {name: tensors[name] for name in plan.names_of(section, writer)}
        write(folder / file, share)
        by_file[file] = {name: facts_of(tensor) for name, tensor in share.items()}
    assert len(by_file) == num_writers
    if num_writers > 1:
        write_file(folder / INDEX_FILE, index_json(by_file))
        weight_map = read_index(folder / INDEX_FILE)
        assert {name: weight_map[name] for name in tensors} == {
            name: plan.file("model", name) for name in tensors
        }
        total = json.loads((folder / INDEX_FILE).read_text())["metadata"]["total_size"]
        assert total == sum(tensor.nbytes for tensor in tensors.values())
    write_file(folder / "config.json", model.config.to_json_string(use_diff=False).encode())
    return tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_writers", [1, 3])
def test_transformers_opens_what_is_written(tmp_path, num_writers, tied):
    model = tiny_llama(tied)
    tensors = write_model(tmp_path, model, num_writers)
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded.eval()(tokens).logits)
    assert_reads(open_source(tmp_path), tensors)


@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
def test_what_transformers_writes_is_read(tmp_path, shard_size):
    model = tiny_llama(tied=False)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "20KB")
    assert_reads(open_source(tmp_path), model.state_dict())


def assert_reads(source: Source, tensors: Mapping[str, Tensor]) -> None:
    assert sorted(source.names) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), tensor)
