"""State dicts are whole, exact, copies, and the same on every mesh."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import build, loss_of, tokens
from torch import nn
from wrapped import make_mesh, prepare, train

import dmuon


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


def through_torch_save(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_resuming_on_the_same_mesh_is_bit_identical(shape: tuple[int, ...], reshard: bool) -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(*shape)
        model = prepare(mesh, reshard)
        optimizer = dmuon.Muon(model, weight_decay=0.1)
        train(model, optimizer, range(3))
        model_state = through_torch_save(dmuon.get_model_state_dict(model))
        optimizer_state = through_torch_save(dmuon.get_optimizer_state_dict(model, optimizer))
        undisturbed = train(model, optimizer, range(3, 6))

        again = prepare(mesh, reshard, seed=7)
        other = dmuon.Muon(again, lr=0.5, weight_decay=0.5)  # settings come back with the state
        dmuon.set_model_state_dict(again, model_state)
        dmuon.set_optimizer_state_dict(again, other, optimizer_state)
        assert train(again, other, range(3, 6)) == undisturbed
        assert same(dmuon.get_model_state_dict(again), dmuon.get_model_state_dict(model))
        assert other.num_steps == optimizer.num_steps == 6

    run_ranks(int(torch.tensor(shape).prod()), body)


def test_a_dict_on_the_first_rank_alone_is_enough() -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(3)
        model = prepare(mesh)
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(2))
        model_state = dmuon.get_model_state_dict(model, rank0_only=True, cpu_offload=True)
        state = dmuon.get_optimizer_state_dict(model, optimizer, rank0_only=True)
        assert bool(model_state) == bool(state) == (rank == 0)
        again = prepare(mesh, seed=5)
        other = dmuon.Muon(again)
        dmuon.set_model_state_dict(again, model_state)
        dmuon.set_optimizer_state_dict(again, other, state)
        assert train(again, other, range(2, 4)) == train(model, optimizer, range(2, 4))

    run_ranks(3, body)


def test_a_state_of_four_ranks_continues_on_any_other_mesh() -> None:
    saved: dict[str, Any] = {}

    def states(rank: int) -> None:
        model = prepare(make_mesh(4))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        train(model, optimizer, range(2))
        state = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
        losses = train(model, optimizer, range(2, 5))
        torch.save((*state, losses), path) if rank == 0 else None

    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "state")
        run_ranks(4, states)
        model_state, optimizer_state, losses = torch.load(path, weights_only=True)
    saved.update(model=model_state, optimizer=optimizer_state)

    for shape in ((1,), (3,), (2, 2), (2, 1)):

        def resume(rank: int, shape: tuple[int, ...] = shape) -> None:
            model = prepare(make_mesh(*shape), seed=3)
            optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
            dmuon.set_model_state_dict(model, saved["model"])
            dmuon.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
            assert same(dmuon.get_model_state_dict(model), saved["model"])
            resumed = torch.tensor(train(model, optimizer, range(2, 5)))
            torch.testing.assert_close(resumed, torch.tensor(losses), rtol=0, atol=1e-4)

        run_ranks(int(torch.tensor(shape).prod()), resume)


def test_a_plain_torch_save_loads_exactly_and_what_we_give_loads_strictly() -> None:
    def body(rank: int) -> None:
        plain = build(11)
        model = prepare(make_mesh(2))
        dmuon.set_model_state_dict(model, through_torch_save(plain.state_dict()))
        state = dmuon.get_model_state_dict(model)
        assert same(state, dict(plain.state_dict()))
        fresh = build(12)
        fresh.load_state_dict(state, strict=True)
        with torch.no_grad():
            rows = tokens(0)
            assert torch.equal(loss_of(fresh, rows), loss_of(plain, rows))

    run_ranks(2, body)


def test_values_are_copies_and_never_move_with_the_weights() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(1))
        taken = dmuon.get_model_state_dict(model)
        moments = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]
        kept = {name: value.clone() for name, value in taken.items()}
        kept_moments = {n: v["momentum_buffer"].clone() for n, v in moments.items()}
        train(model, optimizer, range(1, 2))
        assert same(taken, kept)
        for name, value in kept_moments.items():
            assert torch.equal(moments[name]["momentum_buffer"], value)
        storages = {value.untyped_storage().data_ptr() for value in taken.values()}
        assert len(storages) == len(taken)

    run_ranks(2, body)


def test_new_weights_are_seen_the_moment_after_step() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2, 2))
        optimizer = dmuon.Muon(model, replicate_async=True)
        for _ in range(3):
            before = dmuon.get_model_state_dict(model)
            train(model, optimizer, range(1))
            after = dmuon.get_model_state_dict(model)
            moved = [n for n in after if "proj.weight" in n]
            assert all(not torch.equal(before[n], after[n]) for n in moved)
            for name in moved:
                gathered = [torch.empty_like(after[name]) for _ in range(4)]
                dist.all_gather(gathered, after[name])
                assert all(torch.equal(gathered[0], each) for each in gathered), name

    run_ranks(4, body)


def _broken(state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    state["extra"] = torch.zeros(1)
    state["norm.weight"] = torch.zeros(3)
    del state["layers.1.q_proj.weight"]
    return state


def test_a_dict_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        before = dmuon.get_model_state_dict(model)
        good = build(3).state_dict()
        bad = _broken(good) if rank == 1 else dict(good)
        with pytest.raises(dmuon.StateDictError) as caught:
            dmuon.set_model_state_dict(model, bad)
        text = str(caught.value)
        assert "layers.1.q_proj.weight: missing" in text
        assert "extra: not in this model" in text
        assert "norm.weight: has shape [3], needs [24]" in text
        assert same(before, dmuon.get_model_state_dict(model))

    run_ranks(2, body)


def test_loading_without_strict_reports_what_it_passed_over() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        partial = dict(build(3).state_dict())
        del partial["layers.1.q_proj.weight"]
        partial["extra"] = torch.zeros(1)
        report = dmuon.set_model_state_dict(model, partial, strict=False)
        assert report.missing_keys == ["layers.1.q_proj.weight"]
        assert report.unexpected_keys == ["extra"]
        state = dmuon.get_model_state_dict(model)
        assert torch.equal(state["layers.2.q_proj.weight"], partial["layers.2.q_proj.weight"])
        assert torch.equal(
            state["layers.1.q_proj.weight"], build().state_dict()["layers.1.q_proj.weight"]
        )

    run_ranks(2, body)


def test_an_optimizer_dict_that_does_not_fit_is_refused_with_names() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(1))
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        state["dedicated"]["layers.9.q_proj.weight"] = {"momentum_buffer": torch.zeros(2, 2)}
        state["fsdp2"]["norm.weight"]["exp_avg"] = torch.zeros(5)
        with pytest.raises(dmuon.StateDictError, match=r"layers\.9\.q_proj.*no such parameter"):
            dmuon.set_optimizer_state_dict(model, optimizer, state)
        moments = state["fsdp2"]["head.weight"]
        hidden = next(name for name in state["dedicated"] if "layers.9" not in name)
        others = {
            r"this is one of torch's.*MOVING": {"state": {}, "param_groups": []},
            "4/exp_avg: a number is no name; .*get_state_dict": {"fsdp2": {4: moments}},
            f"{hidden}/step: is a hidden matrix.*leave them out": {"fsdp2": {hidden: moments}},
            "head.weight/step: is no hidden matrix here": {"dedicated": {"head.weight": moments}},
        }
        for match, theirs in others.items():
            with pytest.raises(dmuon.StateDictError, match=match):
                dmuon.set_optimizer_state_dict(model, optimizer, theirs)

    run_ranks(2, body)


def test_sections_of_other_writers_are_read() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        train(model, optimizer, range(2))
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        head = {"head.weight": state["fsdp2"].pop("head.weight")}
        other = {"fsdp": state["fsdp2"], "dedicated_adamw": head, "dedicated": state["dedicated"]}
        again = prepare(make_mesh(2))
        fresh = dmuon.Muon(again)
        dmuon.set_optimizer_state_dict(again, fresh, other)
        loaded = dmuon.get_optimizer_state_dict(again, fresh)
        assert torch.equal(
            loaded["fsdp2"]["head.weight"]["exp_avg"], head["head.weight"]["exp_avg"]
        )
        assert loaded["fsdp2"].keys() == {*state["fsdp2"], "head.weight"}

    run_ranks(2, body)


def test_plain_state_dict_calls_are_refused_with_the_way_out() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        with pytest.raises(dmuon.OwnershipError, match="get_model_state_dict"):
            model.state_dict()
        with pytest.raises(dmuon.OwnershipError, match="set_model_state_dict"):
            model.layers[0].load_state_dict({}, strict=False)
        with pytest.raises(dmuon.OwnershipError, match="get_optimizer_state_dict"):
            optimizer.state_dict()
        with pytest.raises(dmuon.OwnershipError, match="set_optimizer_state_dict"):
            optimizer.load_state_dict({})

    run_ranks(2, body)


def test_a_bfloat16_model_keeps_its_float32_master_over_a_resume() -> None:
    def body(rank: int) -> None:
        def fresh(seed: int) -> tuple[nn.Module, dmuon.Muon]:
            from wrapped import wrap

            model = wrap(build(seed).to(torch.bfloat16), make_mesh(2))
            return model, dmuon.Muon(model, lr=1e-4)

        model, optimizer = fresh(0)
        train(model, optimizer, range(2))
        states = (
            dmuon.get_model_state_dict(model),
            dmuon.get_optimizer_state_dict(model, optimizer),
        )
        assert states[0]["layers.0.q_proj.weight"].dtype == torch.bfloat16
        undisturbed = train(model, optimizer, range(2, 5))
        again, other = fresh(1)
        dmuon.set_model_state_dict(again, states[0])
        dmuon.set_optimizer_state_dict(again, other, states[1])
        assert train(again, other, range(2, 5)) == undisturbed
        left = dmuon.get_optimizer_state_dict(model, optimizer)["dedicated"]
        right = dmuon.get_optimizer_state_dict(again, other)["dedicated"]
        assert all(torch.equal(left[n]["master_weight"], right[n]["master_weight"]) for n in left)

    run_ranks(2, body)
