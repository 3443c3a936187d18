"""The guide for torchrun: its files and commands, run as they are printed."""

import shutil
from pathlib import Path

import pytest
import torch
from printed import block, losses_of, run, run_forked

import dmuon

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
transformers.LlamaForCausalLM  # noqa: B018 - forked ranks inherit it

GUIDE = "dmuon/GUIDE.md"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, float]]]:
    """The folder in which the commands ran one after the other, and the losses of each."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("train.py", "load.py"):
        (folder / name).write_text(block(GUIDE, f"file: {name}", "python"), encoding="utf-8")
    commands = block(GUIDE, "commands: train.py", "bash").splitlines()
    first, *others = commands
    outputs = [run(first, folder), *(run_forked(command, folder) for command in others)]
    return folder, [losses_of(output) for output in outputs]


def test_each_command_goes_on_where_the_last_one_stopped(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    _, losses = trained
    assert [sorted(each) for each in losses] == [
        list(range(first, first + 20)) for first in (1, 21, 41)
    ]


def test_the_losses_are_those_of_one_process_that_was_never_stopped(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, losses = trained
    alone = losses_of(run_forked(_ALONE, folder))
    pieces = {step: loss for each in losses for step, loss in each.items()}
    assert pieces == pytest.approx(alone, abs=2e-3)
    assert alone[60] < 0.7 * alone[1]


_ALONE = "torchrun --standalone --nproc-per-node 1 train.py --steps 60 --folder alone"


def test_the_checkpoint_opens_without_dmuon(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, _ = trained
    assert "import " in run(block(GUIDE, "commands: load.py", "bash").strip(), folder)


def test_fine_tuning_begins_with_the_pretrained_loss_and_keeps_the_tokenizer(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, losses = trained
    script = block(GUIDE, "file: train.py", "python")
    begin, end = script.index("config = LlamaConfig("), script.index("optimizer = dmuon.Muon(")
    tuned = script[:begin] + block(GUIDE, "replace in train.py", "python") + script[end:]
    line = '        files = {"config.json": config.to_json_string().encode()}\n'
    assert line in tuned
    more = block(GUIDE, "add to files in train.py", "python")
    tuned = tuned.replace(line, f"{line}        {more}")
    tuned = tuned.replace("\nlibrary = ", f"\n{_OTHER_RATES}\nlibrary = ")
    (folder / "tune.py").write_text(tuned, encoding="utf-8")
    shutil.copytree(folder / "checkpoints" / "step-000060", folder / "pretrained")
    (folder / "pretrained" / "tokenizer.json").write_text("{}")
    first = losses_of(
        run_forked(
            "torchrun --standalone --nproc-per-node 2 tune.py --steps 2 --folder tuned", folder
        )
    )[1]
    assert first < losses[0][1] * 0.7
    assert (folder / "tuned" / "step-000002" / "tokenizer.json").read_text() == "{}"


_OTHER_RATES = f"""
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
{block(GUIDE, "other rates", "python")}
scheduler.step()
assert [group["lr"] for group in optimizer.param_groups] == [0.005, 1e-3]
"""


def test_groups_train_and_a_module_loads_the_one_file(
    trained: tuple[Path, list[dict[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = trained
    script = block(GUIDE, "file: train.py", "python")
    line = "optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3)\n"
    assert line in script
    groups = block(GUIDE, "groups", "python")
    (tmp_path / "grouped.py").write_text(script.replace(line, groups), encoding="utf-8")
    run_forked("torchrun --standalone --nproc-per-node 2 grouped.py --steps 1", tmp_path)
    saved = dmuon.read_manifest(tmp_path / "checkpoints" / "step-000001").optimizer
    assert saved is not None
    decays = {n: g["weight_decay"] for g in saved.param_groups for n in g["names"]}
    assert {n for n, decay in decays.items() if decay == 0} == {n for n in decays if "norm" in n}

    monkeypatch.chdir(folder)
    config = transformers.LlamaConfig.from_pretrained("checkpoints/step-000060")
    model = transformers.LlamaForCausalLM(config)
    exec(block(GUIDE, "one file", "python"), {"dmuon": dmuon, "torch": torch, "model": model})
    opened = transformers.LlamaForCausalLM.from_pretrained("checkpoints/step-000060")
    assert torch.equal(model.lm_head.weight, opened.lm_head.weight.to(torch.float32))
