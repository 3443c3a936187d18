"""Scripts that are moved over: run as they are printed, and compared with one process.

The losses of one process come from the formulas, with the batches that all those scripts read.
"""

import re
import subprocess
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import block, losses_of, run, run_forked
from ranks_runner import run_ranks
from tiny import FormulaMuon
from torch.distributed.device_mesh import init_device_mesh

import dmuon

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
pytest.importorskip("accelerate", reason="needs the hf extra")
transformers.Trainer, transformers.LlamaForCausalLM  # noqa: B018 - forked ranks inherit them

MOVING = "dmuon/MOVING.md"
STEPS = 40


def _model_and_rows() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    return model, torch.tensor(list(text[: STEPS * 16 * 64])).view(STEPS, 16, 64)


def _losses_alone(
    warmed: int, weight_decay: float = 0.0, lr: float = 0.02, adamw_lr: float = 3e-3
) -> dict[int, float]:
    model, rows = _model_and_rows()
    formula = FormulaMuon(
        model,
        is_muon=dmuon.is_hidden_matrix,
        coefficients=list(dmuon.POLAR_EXPRESS_COEFFICIENTS[:5]),
        weight_decay=weight_decay,
    )
    losses = {}
    for step in range(STEPS):
        loss = model(input_ids=rows[step], labels=rows[step]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(1.0, (step + warmed) / 10)
        formula.lr, formula.adamw_lr = lr * factor, adamw_lr * factor
        formula.step()
        losses[step + 1] = loss.item()
    return losses


def _assert_same(losses: dict[int, float], alone: dict[int, float]) -> None:
    """Equal within rounding, which grows with the steps."""
    assert len(losses) == STEPS
    for step, loss in losses.items():
        assert loss == pytest.approx(alone[step], abs=1e-3 if step <= STEPS // 2 else 2e-2), step


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text(
            block(MOVING, f"file: {name}", name.rpartition(".")[2].replace("py", "python"))
        )


def _commands(name: str) -> list[str]:
    return block(MOVING, f"commands: {name}", "bash").splitlines()


@pytest.fixture(scope="module")
def alone() -> dict[int, float]:
    """With the schedule of transformers, whose first factor is zero."""
    return _losses_alone(0)


_PRINT_DECAYS = """
for group in optimizer.param_groups:  # at full rate
    print("decay", group["lr"] * group["weight_decay"])
"""


def _decays_of(output: str) -> list[float]:
    """What a step takes off the weights of each group."""
    return [float(decay) for decay in re.findall(r"^decay (\S+)$", output, re.M)]


def test_a_script_with_adamw_moves_over_with_a_diff_of_nine_lines(tmp_path: Path) -> None:
    _write(tmp_path, "fsdp.py", "fsdp.diff")
    path, (command,) = tmp_path / "fsdp.py", _commands("fsdp.py")
    path.write_text(path.read_text() + _PRINT_DECAYS)
    plain = run_forked(command, tmp_path)
    subprocess.run(["patch", "fsdp.py", "fsdp.diff"], cwd=tmp_path, check=True, timeout=60)
    changed = re.findall(r"^[+-](?![+-]).*\S", (tmp_path / "fsdp.diff").read_text(), re.M)
    moved = run(command, tmp_path)
    before, after = losses_of(plain), losses_of(moved)
    assert len(changed) == 9
    assert before[1] == after[1]
    _assert_same(after, _losses_alone(1, weight_decay=0.0015))
    assert after[STEPS] < before[STEPS] < before[1]
    assert torch.load(tmp_path / "model.pt")["lm_head.weight"].shape == (256, 64)
    (decay,) = _decays_of(plain)
    assert _decays_of(moved) == pytest.approx([decay] * 4)  # of two groups, by two ranks


def test_in_a_small_model_and_few_steps_the_rate_of_adamw_weighs_more() -> None:
    """As LEARNING_RATE.md says."""

    def end(**rates: float) -> float:
        losses = _losses_alone(1, weight_decay=0.0015, **rates)
        return sum(losses[step] for step in range(STEPS - 3, STEPS + 1)) / 4

    usual = end()
    assert all(end(lr=lr) == pytest.approx(usual, abs=0.05) for lr in (0.003, 0.048))
    assert end(adamw_lr=6e-3) < usual - 0.15


def test_a_checkpoint_of_torch_is_gone_on_with(tmp_path: Path) -> None:
    _write(tmp_path, "fsdp.py", "fsdp.diff")
    path, (command,) = tmp_path / "fsdp.py", _commands("fsdp.py")
    script = path.read_text()
    save_with_torch = block(MOVING, "save with torch", "python")
    path.write_text(script.replace("\nfull = ", f"\n{save_with_torch}\nfull = "))
    run_forked(command, tmp_path)
    run(*_commands("old.pt"), tmp_path)
    loss, expected = _one_step_of_adamw(torch.load(tmp_path / "old.pt"))

    path.write_text(script)
    subprocess.run(["patch", "fsdp.py", "fsdp.diff"], cwd=tmp_path, check=True, timeout=60)
    resume, save = (block(MOVING, name, "python") for name in ("resume", "save"))
    loop, zero = "\nfor step in range(40):\n", "    optimizer.zero_grad()\n"
    script = path.read_text()
    for end in (20, 40):
        changed = script.replace(loop, f"\n{resume}\nfor step in range(start, {end}):\n")
        more = textwrap.indent(save, "    ") + _KEEP_FIRST_STEP
        path.write_text(changed.replace(zero, zero + more))
        output = run_forked(command, tmp_path)
        losses = losses_of(output)
        assert sorted(losses) == list(range(end - 19, end + 1))
        assert ("loaded checkpoints/step-000020 of step 20\n" in output) == (end == 40)
        assert end == 40 or losses[1] == pytest.approx(loss, abs=1e-3)
    last = dmuon.read_manifest(tmp_path / "checkpoints" / "step-000040")
    assert last.extra["scheduler"]["last_epoch"] == 40

    start, first = torch.load(tmp_path / "old.pt")["model"], torch.load(tmp_path / "first0.pt")
    for name, update in expected.items():
        assert (first[name] - start[name] - update).norm() <= 1e-3 * update.norm(), name


_KEEP_FIRST_STEP = """
    if step == 0:
        torch.save(dmuon.get_model_state_dict(model), f"first{rank}.pt")
"""


@pytest.mark.parametrize("warmed", [None, 0, 1], ids=str)
def test_the_schedule_of_another_optimizer_goes_on_in_its_middle(warmed: int | None) -> None:
    """Also after a scheduler was made, whose warm-up begins with that many tenths of the rate."""

    def rates(optimizer: torch.optim.Optimizer) -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    def body(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        dmuon.dedicate_params(
            model, init_device_mesh("cpu", (1,)), lambda name, param: name == "0.weight"
        )
        given = {
            "optimizer": dmuon.Muon(model, lr=0.02, adamw_lr=0.003),
            "torch": torch,
        }
        if warmed is not None:
            torch.optim.lr_scheduler.LambdaLR(
                given["optimizer"], lambda step: min(1.0, (step + warmed) / 10)
            )
        exec(block(MOVING, "schedule", "python"), given)
        optimizer = torch.optim.SGD(
            [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.02, 0.003)]
        )
        whole = torch.optim.lr_scheduler.LambdaLR(optimizer, given["scheduler"].lr_lambdas[0])
        for _ in range(given["start"]):
            whole.optimizer.step()
            whole.step()
        for _ in range(3):
            assert rates(given["optimizer"]) == rates(whole.optimizer)
            for each in (given["scheduler"], whole):
                each.optimizer.step()
                each.step()

    run_ranks(1, body)


def _one_step_of_adamw(old: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first batch after that checkpoint, and AdamW's next updates by name."""
    model, rows = _model_and_rows()
    model.load_state_dict(old["model"])
    names = [
        name for name, param in model.named_parameters() if not dmuon.is_hidden_matrix(name, param)
    ]
    params = [model.get_parameter(name) for name in names]
    adamw = torch.optim.AdamW(params, lr=3e-3 / 10, weight_decay=0.01)  # at the first step
    for name, param in zip(names, params, strict=True):
        adamw.state[param] = old["optimizer"]["state"][name]
    loss = model(input_ids=rows[0], labels=rows[0]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    updates = {n: p.detach() - old["model"][n] for n, p in zip(names, params, strict=True)}
    return loss.item(), updates


def test_accelerate_trains_as_one_process(tmp_path: Path, alone: dict[int, float]) -> None:
    _write(tmp_path, "accelerated.py")
    _assert_same(losses_of(run_forked(*_commands("accelerated.py"), tmp_path)), alone)


@pytest.mark.parametrize(
    ("given", "error"), [("model", "RuntimeError"), ("optimizer", "dmuon.errors.OwnershipError")]
)
def test_what_accelerate_cannot_prepare_is_an_error(tmp_path: Path, given: str, error: str) -> None:
    _write(tmp_path, "accelerated.py")
    script = (tmp_path / "accelerated.py").read_text()
    wrong = script.replace("\nloader = ", f"\naccelerator.prepare({given})\nloader = ")
    (tmp_path / "accelerated.py").write_text(wrong)
    with pytest.raises(AssertionError, match=f"prepare.(?s:.)*\\n{error}: "):
        run_forked(*_commands("accelerated.py"), tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    folder = tmp_path_factory.mktemp("trainer")
    _write(folder, "trainer.py")
    losses: dict[int, float] = {}
    for command in _commands("trainer.py"):
        more = losses_of(run_forked(command, folder))
        assert not set(more) & set(losses)
        losses |= more
    return folder, losses


def test_the_trainer_trains_and_resumes_as_one_process(
    trained: tuple[Path, dict[int, float]], alone: dict[int, float]
) -> None:
    _assert_same(trained[1], alone)


def test_the_checkpoint_of_the_trainer_opens_without_dmuon(
    trained: tuple[Path, dict[int, float]],
) -> None:
    folder, _ = trained
    for name in ("checkpoint-40", "final-20", "final-40"):
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "trained" / name)
        assert model.config.hidden_size == 64


def test_the_trainer_loads_the_best_of_its_checkpoints(tmp_path: Path) -> None:
    _write(tmp_path, "trainer.py")
    script = (tmp_path / "trainer.py").read_text()
    more = """
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, greater_is_better=True,
    ),
    eval_dataset=[{"input_ids": row, "labels": row} for row in rows[:24]],
"""
    script = script.replace("save_steps=20", "save_steps=2")
    script = script.replace("    ),\n    train_", f"{more}    train_")
    seen = "losses = [x['eval_loss'] for x in trainer.state.log_history if 'eval_loss' in x]\n"
    seen += "print('first', losses[0], trainer.evaluate()['eval_loss'])\n"
    (tmp_path / "trainer.py").write_text(script + seen)
    output = run_forked("torchrun --nproc-per-node 2 trainer.py --steps 4", tmp_path)
    (numbers,) = re.findall(r"^first (\S+) (\S+)$", output, re.M)
    assert numbers[0] == numbers[1]
