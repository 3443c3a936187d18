"""Wrong set-up is refused by name, on every rank, before anything changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks_runner import run_ranks
from tiny import build, is_proj
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrapped import make_mesh, prepare, wrap

import dmuon


def refuse(world_size: int, match: str, attempt: object) -> None:
    def body(rank: int) -> None:
        assert callable(attempt)
        with pytest.raises(dmuon.SetupError, match=match):
            attempt(rank)

    run_ranks(world_size, body)


def test_fully_shard_before_dedicate_params() -> None:
    def attempt(rank: int) -> None:
        model = build()
        fully_shard(model, mesh=make_mesh(2))
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)

    refuse(2, "wrapped by fully_shard already", attempt)


def test_dedicating_twice() -> None:
    def attempt(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        dmuon.dedicate_params(model.layers[0], make_mesh(2)) if False else None
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)

    refuse(2, "dedicated parameters already", attempt)


def test_a_predicate_that_matches_nothing() -> None:
    refuse(
        1,
        "matches no parameter",
        lambda rank: dmuon.dedicate_params(build(), make_mesh(1), lambda n, p: False),
    )


def test_a_vector_cannot_be_orthogonalised() -> None:
    refuse(
        1,
        r"embed|norm1\.weight has shape \(24,\)",
        lambda rank: dmuon.dedicate_params(build(), make_mesh(1), lambda n, p: "norm" in n),
    )


def test_a_2d_mesh_needs_its_names() -> None:
    def attempt(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        dmuon.dedicate_params(build(), mesh)

    refuse(2, r"\(replicate, shard\) in this order", attempt)


def test_a_mesh_of_three_axes() -> None:
    def attempt(rank: int) -> None:
        dmuon.dedicate_params(build(), init_device_mesh("cpu", (1, 1, 1)))

    refuse(1, "1 or 2 axes", attempt)


@pytest.mark.parametrize(
    ("names", "mesh_axis", "replicate_axis", "match"),
    [
        (("shard", "replicate"), None, None, r"named \(replicate, shard\) in this order"),
        (("dp", "fsdp"), None, None, r"named \(replicate, shard\) in this order"),
        (("replicate", "shard"), "shard", "shard", r"must meet in this rank alone"),
        (("replicate", "shard"), None, "replicate", "both meshes must have one axis"),
    ],
    ids=["swapped", "other names", "overlapping", "two and one"],
)
def test_axes_misnamed_or_overlapping(
    names: tuple[str, str], mesh_axis: str | None, replicate_axis: str | None, match: str
) -> None:
    def attempt(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        dmuon.dedicate_params(
            build(),
            mesh if mesh_axis is None else mesh[mesh_axis],
            replicate_mesh=None if replicate_axis is None else mesh[replicate_axis],
        )

    refuse(4, match, attempt)


def test_something_that_is_no_mesh() -> None:
    refuse(1, "DeviceMesh", lambda rank: dmuon.dedicate_params(build(), "cpu"))  # type: ignore[arg-type]


def test_ranks_with_different_models_are_told_where() -> None:
    def attempt(rank: int) -> None:
        dmuon.dedicate_params(build(num_layers=2 + rank), make_mesh(2), predicate=is_proj)

    refuse(2, r"rank 1 has layers\.2\.norm1\.weight \[24\] .* instead of norm\.weight", attempt)


def test_ranks_with_different_predicates_dtypes_and_settings_are_told_which() -> None:
    def attempt(what: str) -> Callable[[int], None]:
        def on(rank: int) -> None:
            model, odd = build(), rank == 1
            if what == "dtype" and odd:
                model.layers[1].bfloat16()
            if what == "frozen" and odd:
                model.layers[0].k_proj.requires_grad_(False)
            is_chosen = (lambda n, p: "q_proj" in n) if what == "predicate" and odd else is_proj
            dmuon.dedicate_params(
                model, make_mesh(2), is_chosen, reshard_after_forward=what != "policy" or not odd
            )

        return on

    refuse(2, r"rank 1 has layers\.1\.norm1\.weight \[24\] torch.bfloat16 inst", attempt("dtype"))
    refuse(2, r"rank 1 has layers\.0\.k_proj\.weight .*, frozen, ded", attempt("frozen"))
    refuse(2, r"rank 1 has layers\.0\.k_proj\.weight \[24, 24\] torch", attempt("predicate"))
    refuse(2, "rank 1 has reshard_after_forward=False", attempt("policy"))


def test_muon_before_fully_shard() -> None:
    def attempt(rank: int) -> None:
        model = build()
        dmuon.dedicate_params(model, make_mesh(2), predicate=is_proj)
        dmuon.Muon(model)

    refuse(2, r"embed\.weight is neither dedicated nor sharded", attempt)


def test_the_guide_quotes_what_torch_says_of_initialising_afterwards() -> None:
    guide = " ".join((Path(dmuon.__file__).parent / "GUIDE.md").read_text().split())

    def body(rank: int) -> None:
        model = build()
        wrap(model, make_mesh(2))
        refused = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                try:
                    nn.init.normal_(module.weight)
                except RuntimeError as error:
                    refused.append(str(error))
        quoted = "more than one element of the written-to tensor refers to a single memory location"
        assert refused
        assert all(quoted in message for message in refused)
        assert quoted in guide
        whole = build().state_dict() if rank == 0 else {}
        dmuon.set_model_state_dict(model, whole)
        state = dmuon.get_model_state_dict(model)
        assert all(torch.equal(state[name], value) for name, value in build().state_dict().items())

    run_ranks(2, body)


def test_muon_on_a_model_without_dedication() -> None:
    refuse(1, "no dedicated parameters", lambda rank: dmuon.Muon(build()))


def test_muon_on_parameters_instead_of_the_model() -> None:
    refuse(1, "takes the model", lambda rank: dmuon.Muon(build().parameters()))  # type: ignore[arg-type]
    groups = r"\(got list\): Muon\(model\), and for groups .* Muon\(model, param_groups="
    refuse(1, groups, lambda rank: dmuon.Muon([{"params": []}]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": -1}, "lr must be a number of at least 0, got -1"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"ns_steps": 0}, "ns_steps must be a whole number of at least 1, got 0"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be one"),
        ({"adjust_lr_fn": "adam"}, "adjust_lr_fn must be one of"),
        ({"adamw_betas": (0.9, 1.5)}, "adamw_betas"),
        ({"ns_dtype": torch.int8}, "ns_dtype"),
        ({"param_groups": [{"params": [], "lrr": 1}]}, "lrr is unknown, the nearest is lr"),
        ({"param_groups": [{"params": ["nobody"]}]}, r"not one of this model.*\(nobody\)"),
        ({"param_groups": [{"params": ["norm.weight"] * 2}]}, "in two parameter groups"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, object], match: str) -> None:
    refuse(1, match, lambda rank: dmuon.Muon(prepare(make_mesh(1)), **settings))


def test_param_groups_split_by_kind_and_override() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        named = dict(model.named_parameters())
        first = [param for name, param in named.items() if name.startswith("layers.0")]
        optimizer = dmuon.Muon(
            model, param_groups=[{"params": first, "lr": 0.5, "adamw_weight_decay": 0.0}]
        )
        groups = [(g["algorithm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
        assert groups == [
            ("muon", 0.5, 0.0),
            ("adamw", 1e-3, 0.0),
            ("muon", 0.02, 0.0),
            ("adamw", 1e-3, 0.01),
        ]
        names = [n for g in optimizer.param_groups for n in g["names"]]
        assert sorted(names) == sorted(named)

    run_ranks(2, body)


def test_groups_take_the_names_that_a_wrapped_model_has() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        names = [name for name, _ in model.named_parameters()]
        assert any("_checkpoint_wrapped_module" in name for name in names)
        optimizer = dmuon.Muon(model, param_groups=[{"params": names, "lr": 0.5}])
        assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]

    run_ranks(1, body)


def test_the_default_predicate_leaves_embedding_and_head_to_adamw() -> None:
    def body(rank: int) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tok = nn.Embedding(7, 6)
                self.body = nn.Linear(6, 6)
                self.head = nn.Linear(6, 7)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.body(self.tok(x)))

        model = Odd()
        dmuon.dedicate_params(model, make_mesh(1))
        assert list(dmuon.get_dedicated_params(model)) == ["body.weight"]

    run_ranks(1, body)


def test_plain_fully_shard_calls_leave_dedicated_parameters_alone() -> None:
    def body(rank: int) -> None:
        model = wrap(build(), make_mesh(2))
        dmuon.Muon(model)
        dedicated = dmuon.get_dedicated_params(model)
        assert all(type(param.data) is torch.Tensor for param in dedicated.values())
        rest = [param for name, param in model.named_parameters() if name not in dedicated]
        assert all(hasattr(param, "placements") for param in rest)
        assert "named_parameters" not in model.layers[0].q_proj.__dict__

    run_ranks(2, body)


@pytest.mark.parametrize("ours", [None, torch.bfloat16])
def test_fully_shard_with_another_precision(ours: torch.dtype | None) -> None:
    def attempt(rank: int) -> None:
        mesh, model = make_mesh(1), build()
        theirs = None if ours else torch.bfloat16
        dmuon.dedicate_params(
            model, mesh, is_proj, mp_policy=MixedPrecisionPolicy(param_dtype=ours)
        )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=theirs))
        fully_shard(model, mesh=mesh)
        dmuon.Muon(model)

    refuse(1, r"fully_shard computes .* give both the same mp_policy", attempt)


def test_symmetric_parameters_without_values() -> None:
    def attempt(rank: int) -> None:
        mesh = make_mesh(1)
        with torch.device("meta"):
            model = build()
        dmuon.dedicate_params(model, mesh, is_proj)
        fully_shard(model, mesh=mesh)
        with pytest.raises(dmuon.StateDictError, match=r"embed.weight: is on the meta device"):
            dmuon.set_model_state_dict(model, build().state_dict())
        dmuon.Muon(model)

    refuse(1, r"more parameters have no values, they come from the meta device", attempt)
