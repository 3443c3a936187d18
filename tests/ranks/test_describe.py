"""What ``describe`` and the plan tell: who owns what, and why the rest is left to AdamW."""

import pytest
import torch
from layouts import build_many, splits, wrap_many
from ranks_runner import run_ranks
from tiny import build
from torch import nn
from wrapped import make_mesh

import dmuon


def sections(text: str) -> dict[str, list[str]]:
    """The names below each reason."""
    _, _, rest = text.partition("left to FSDP2 and AdamW:\n")
    lines = [line.split(": ", 1) for line in rest.splitlines() if line.startswith("  ")]
    return {reason.strip(): names.split(", ") for reason, names in lines}


def test_every_parameter_is_in_the_table_or_below_a_reason() -> None:
    def body(rank: int) -> None:
        model = build_many()
        plan = wrap_many(model, make_mesh(2))
        text = dmuon.describe(model)
        assert text.startswith(f"{plan}\n")
        table = {line.split()[0]: line for line in str(plan).splitlines()}
        for name, ending in {
            "layers.0.experts.gate_up_proj": "stack of 5, rows split in 2 x 16",
            "layers.0.experts.down_proj": "stack of 5",
            "layers.0.attention.qkv_proj.weight": "matrix, rows split in 24 + 8 + 8",
            "layers.0.in_out.weight": "matrix, columns split in 3 x 24",
            "layers.0.convolutions.plain.weight": "convolution",
            "layers.0.convolutions.grouped.weight": "convolution of 2 groups",
            "layers.0.convolutions.back.weight": "convolution of 2 groups",
        }.items():
            assert table[name].endswith(f"  {ending}"), table[name]
        reasons = sections(text)
        assert list(reasons) == [
            "an embedding",
            "a bias",
            "fewer than two dimensions",
            "a leading dimension of one (token, position table, depthwise convolution)",
            "an output head",
        ]
        assert reasons["an embedding"] == ["embed.weight"]
        assert reasons["an output head"] == ["head.weight"]
        assert "layers.1.experts.gate_up_bias" in reasons["a bias"]
        told = [name for names in reasons.values() for name in names]
        dedicated = list(dmuon.get_dedicated_params(model))
        assert sorted(told + dedicated) == sorted(name for name, _ in model.named_parameters())
        assert "frozen" not in text

    run_ranks(2, body)


def test_ties_frozen_parameters_and_the_choice_of_a_predicate_are_named() -> None:
    def body(rank: int) -> None:
        model = build()
        model.head.weight = model.embed.weight
        model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
        model.layers[0].k_proj.weight.requires_grad_(False)
        model.norm.weight.requires_grad_(False)
        dmuon.dedicate_params(model, make_mesh(1), lambda n, p: "q_proj" in n or "k_proj" in n)
        text = dmuon.describe(model)
        reasons = sections(text)
        assert reasons["an embedding"] == ["embed.weight"]
        assert reasons["tied to embed.weight"] == ["head.weight"]
        assert "layers.0.v_proj.weight" in reasons["the predicate did not choose it"]
        assert "layers.1.q_proj.weight is tied to layers.0.q_proj.weight" in text.splitlines()
        assert text.endswith("\nfrozen: layers.0.k_proj.weight, norm.weight")

    run_ranks(1, body)


def test_describe_is_local_and_names_what_torch_compile_wraps() -> None:
    def body(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(2), lambda n, p: "q_proj" in n)
        model.layers[0] = torch.compile(model.layers[0])
        if rank == 0:
            assert "layers.0.v_proj.weight" in dmuon.describe(model)
            assert "_orig_mod" not in dmuon.describe(model)

    run_ranks(2, body)


def test_a_model_of_dedicated_parameters_alone_is_described() -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        dmuon.dedicate_params(model, make_mesh(1))
        assert "nothing is left to FSDP2 and AdamW" in dmuon.describe(model)

    run_ranks(1, body)


def test_the_table_lines_up() -> None:
    def body(rank: int) -> None:
        plan = dmuon.dedicate_params(build_many(), make_mesh(1), splits=splits)
        header, *rows = str(plan).splitlines()[: len(plan.matrices) + 1]
        for column in ("shape", "owner", "GFLOP", "MiB"):
            end = header.index(column) + len(column)
            for row in rows:
                assert row[end - 1] != " "
                assert row[end : end + 2].strip() == ""

    run_ranks(1, body)


def test_describe_needs_a_dedicated_model() -> None:
    with pytest.raises(dmuon.SetupError, match="no dedicated parameters"):
        dmuon.describe(build())
