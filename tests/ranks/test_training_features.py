"""The order in which people really call things, against one process."""

import pytest
import torch
import torch.distributed as dist
from ranks_runner import run_ranks
from tiny import FormulaMuon, build, is_proj, loss_of, share, tokens
from torch import nn
from wrapped import backward, make_mesh, prepare, train

import dmuon


def expect_equal(state: dict[str, torch.Tensor], alone: nn.Module, atol: float = 2e-5) -> None:
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=atol, msg=name)


def formula_for(alone: nn.Module) -> FormulaMuon:
    return FormulaMuon(alone, coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]))


def test_non_owners_hold_no_storage_between_uses() -> None:
    """Measured on the storages themselves: inside a block whole, outside the owner's share."""
    seen: list[int] = []

    def held(model: nn.Module) -> int:
        tensors = [param.data for param in dmuon.get_dedicated_params(model).values()]
        for block in model._dmuon_dedication.engine.blocks:
            for parcel in block.parcels:
                tensors += [t for t in (parcel.master, parcel._wire) if t is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for size in storages.values() if size > 4)  # a placeholder is 4 bytes

    def body(rank: int) -> None:
        model = prepare(make_mesh(4))
        optimizer = dmuon.Muon(model)
        plan = model._dmuon_dedication.plan
        share_of_owner = plan.bytes_per_owner[rank] // 2  # weights without momentum
        whole = sum(matrix.numel * 4 for matrix in plan.matrices)
        assert held(model) == share_of_owner
        hook = model.layers[1].q_proj.register_forward_hook(lambda *_: seen.append(held(model)))
        for step in range(2):
            backward(model, step)
            assert held(model) == share_of_owner
            optimizer.step()
            assert held(model) == share_of_owner
            optimizer.zero_grad()
        hook.remove()
        assert len(seen) == 2
        for size in seen:  # of three blocks, one is whole and the next one is on its way
            assert share_of_owner < size <= share_of_owner + 2 * whole / 3
        momenta = [s["momentum_buffer"] for s in optimizer.state.values() if "exp_avg" not in s]
        assert sum(m.nbytes for m in momenta) == share_of_owner
        assert max(plan.bytes_per_owner) <= 1.35 * sum(plan.bytes_per_owner) / 4

    run_ranks(4, body)


def test_newton_schulz_runs_once_a_matrix_and_step_and_step_needs_no_collective() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model)
        counters = dmuon.get_counters(model)
        for step in range(3):
            for _ in range(2):  # two micro-batches
                backward(model, step)
            counters.collectives.clear()
            optimizer.step()
            assert not counters.collectives
            optimizer.zero_grad()
        total = torch.tensor(float(counters.newton_schulz))
        dist.all_reduce(total)
        assert total == 3 * len(dmuon.get_dedicated_params(model))
        assert counters.newton_schulz == 3 * len(dmuon.get_owned_params(model))

    run_ranks(2, body)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_evaluation_anywhere_changes_nothing(shape: tuple[int, ...], reshard: bool) -> None:
    def body(rank: int) -> None:
        def run(evaluate: bool) -> tuple[list[float], list[float]]:
            model = prepare(make_mesh(*shape), reshard)
            optimizer = dmuon.Muon(model)
            losses, evaluations = [], []

            def look() -> None:
                if evaluate:
                    with torch.no_grad():
                        evaluations.append(float(loss_of(model.eval(), tokens(99))))
                    model.train()

            for step in range(3):
                look()
                loss = loss_of(model, share(tokens(step), rank, dist.get_world_size()))
                look()
                loss.backward()
                look()
                optimizer.step()
                look()
                optimizer.zero_grad()
                losses.append(float(loss))
            return losses, evaluations

        disturbed, evaluations = run(True)
        assert disturbed == run(False)[0]
        assert evaluations[0] == evaluations[1] == evaluations[2] != evaluations[3]
        assert evaluations[3] == evaluations[4]

    run_ranks(int(torch.tensor(shape).prod()), body)


@pytest.mark.parametrize("synced", [True, False], ids=["every micro-batch", "no_sync"])
def test_accumulation_equals_one_big_batch(synced: bool) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        alone = build()
        formula = formula_for(alone)
        for step in range(3):
            rows = share(tokens(step), rank, 2)
            first, second = rows.chunk(2)
            if synced:
                (loss_of(model, first) / 2).backward()
            else:
                with dmuon.no_sync(model), dmuon.no_sync(model):
                    (loss_of(model, first) / 2).backward()
            (loss_of(model, second) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)], ids=str)
def test_clipping_equals_one_process(shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(*shape))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        alone = build()
        formula = formula_for(alone)
        for step in range(3):
            backward(model, step)
            norm = dmuon.clip_grad_norm_(optimizer if step else model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            loss_of(alone, tokens(step)).backward()
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            formula.step()
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(int(torch.tensor(shape).prod()), body)


@pytest.mark.parametrize("by_model", [True, False], ids=["model", "optimizer"])
def test_zero_grad_leaves_nothing_of_a_skipped_step(by_model: bool) -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        backward(model, 50)
        (model if by_model else optimizer).zero_grad()
        optimizer.step()  # nothing to do: no gradient anywhere
        assert dmuon.get_counters(model).newton_schulz == 0
        assert not optimizer.state
        train(model, optimizer, range(2))
        alone = build()
        formula = formula_for(alone)
        for step in range(2):
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


class Branches(nn.Module):
    """A module that takes one of two ways, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(6, 6)}) for _ in range(3))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = self.layers[0]["proj"](x)
        return self.layers[way]["proj"](x) if way else x


@pytest.mark.parametrize("ways", [(1, 1), (1, 2), (0, 2), (0, 0)], ids=str)
def test_a_gradient_missing_on_some_ranks_counts_as_zero_and_missing_everywhere_is_skipped(
    ways: tuple[int, int],
) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Branches()
        for param in model.parameters():
            param.requires_grad_(param.ndim == 2)
        alone = Branches()
        alone.load_state_dict(model.state_dict())
        dmuon.dedicate_params(
            model, make_mesh(2), predicate=is_proj, hook_boundary_predicate=lambda n, m: False
        )
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        formula = formula_for(alone)
        for name, param in alone.named_parameters():
            param.requires_grad_("weight" in name)
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            model(x[rank], ways[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = sum(alone(x[r], ways[r]).square().mean() for r in range(2)) / 2
            mean.backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_two_steps_in_a_row_use_the_same_gradients_twice() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2, 1))
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        alone = build()
        formula = formula_for(alone)
        backward(model, 0)
        optimizer.step()
        optimizer.step()
        loss_of(alone, tokens(0)).backward()
        kept = [(p, p.grad) for p in alone.parameters()]
        formula.step()
        for param, grad in kept:
            param.grad = grad
        formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)


def test_schedulers_drive_both_kinds_of_groups() -> None:
    def body(rank: int) -> None:
        model = prepare(make_mesh(2))
        optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        train(model, optimizer, range(1))
        schedule.step()
        rates = {g["algorithm"]: g["lr"] for g in optimizer.param_groups}
        assert rates == {"muon": 0.01, "adamw": 5e-4}
        before = dmuon.get_model_state_dict(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, range(1, 2))
        after = dmuon.get_model_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(2, body)


def test_a_second_process_group_in_the_same_process_works(tmp_path: object) -> None:
    def body(rank: int) -> None:
        first = prepare(make_mesh(2))
        losses = train(first, dmuon.Muon(first), range(2))
        dist.barrier()
        dist.destroy_process_group()
        store = f"file://{tmp_path}/again"
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=store)
        second = prepare(make_mesh(2))
        assert train(second, dmuon.Muon(second), range(2)) == losses

    run_ranks(2, body)


def test_checkpointed_blocks_and_a_block_called_twice_equal_one_process() -> None:
    from torch.utils.checkpoint import checkpoint

    class Looped(nn.Module):
        def __init__(self, inner: nn.Module, recompute: bool) -> None:
            super().__init__()
            self.inner, self.recompute = inner, recompute

        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            x = self.inner.embed(tokens_BT)
            for layer in [*self.inner.layers, self.inner.layers[1]]:
                x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            return self.inner.head(self.inner.norm(x))

    def body(rank: int) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = make_mesh(2)
        model = Looped(build(), recompute=True)
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        for layer in model.inner.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        alone = Looped(build(), recompute=False)
        formula = formula_for(alone)
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            loss_of(alone, tokens(step)).backward()
            formula.step()
        expect_equal(dmuon.get_model_state_dict(model), alone)

    run_ranks(2, body)
