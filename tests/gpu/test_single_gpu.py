"""One rank on a GPU with NCCL: the same code, against the same one-process answer."""

import pytest
import torch
import torch.distributed as dist
from tiny import FormulaMuon, build, is_proj, loss_of, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def group(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


def prepare(policy: MixedPrecisionPolicy | None = None) -> torch.nn.Module:
    mesh = init_device_mesh("cuda", (1,))
    model = build()
    dmuon.dedicate_params(model, mesh, predicate=is_proj, mp_policy=policy)
    options = {} if policy is None else {"mp_policy": policy}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def test_training_on_a_gpu_equals_the_formula() -> None:
    model = prepare()
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    alone = build().cuda()
    formula = FormulaMuon(alone, coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]))
    for step in range(6):
        loss_of(model, tokens(step).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone, tokens(step).cuda()).backward()
        formula.step()
    state = dmuon.get_model_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-3, msg=name)


def test_mixed_precision_trains_and_keeps_float32_masters() -> None:
    model = prepare(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = dmuon.Muon(model)
    losses = []
    for _ in range(20):
        loss = loss_of(model, tokens(0).cuda())
        loss.backward()
        dmuon.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
    assert all(v.dtype == torch.float32 for v in dmuon.get_model_state_dict(model).values())


def test_bfloat16_newton_schulz_stays_close_to_float64() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(512, 1024, device="cuda")
    exact = dmuon.newton_schulz(matrix.double(), dtype=torch.float64)
    quick = dmuon.newton_schulz(matrix)
    assert quick.dtype == torch.bfloat16
    assert (quick.double() - exact).norm() < 0.05 * exact.norm()


def test_no_part_of_a_training_step_waits_for_the_device() -> None:
    """Any copy to the host or blocking call between the first forward and the end is an error."""
    model = prepare(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = dmuon.Muon(model)
    rows = tokens(0).cuda()

    def step() -> None:
        loss_of(model, rows).backward()
        dmuon.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
