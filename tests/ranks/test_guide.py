"""The guide for torchrun: its files and commands, run as they are printed."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import safetensors
import torch
from printed import block, losses_of, run, run_forked

import dmuon

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel  # noqa: B018 - forked ranks inherit them

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


def test_a_finished_training_that_is_started_again_says_so(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, _ = trained
    *_, last = block(GUIDE, "commands: train.py", "bash").splitlines()
    assert run_forked(last, folder) == "loaded checkpoints/step-000060, 0 steps to go\n"


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


def test_compiled_layers_train_as_others(
    trained: tuple[Path, list[dict[int, float]]], tmp_path: Path
) -> None:
    folder, (losses, *_) = trained
    script = block(GUIDE, "file: train.py", "python")
    line = "optimizer = dmuon.Muon("
    assert line in script
    compiled = script.replace(line, f"{_QUICKLY}{block(GUIDE, 'compile', 'python')}{line}")
    (tmp_path / "compiled.py").write_text(f"{compiled}{_PRINT_GRAPHS}", encoding="utf-8")
    output = run_forked("torchrun --standalone --nproc-per-node 2 compiled.py --steps 2", tmp_path)
    assert losses_of(output) == pytest.approx({step: losses[step] for step in (1, 2)}, abs=2e-3)
    assert "graphs 4, breaks 0\n" in output
    saved = [tmp_path / "checkpoints" / "step-000002", folder / "checkpoints" / "step-000040"]
    with_graphs, without = (
        {name for names in dmuon.read_manifest(path).tensors.values() for name in names}
        for path in saved
    )
    assert with_graphs == without


_QUICKLY = """
import functools
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # inductor takes a minute
"""
_PRINT_GRAPHS = """
from torch._dynamo.utils import counters
graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"].total()
print(f"graphs {graphs}, breaks {breaks}")
"""


def _tuned(model: str) -> str:
    """The script with what fine-tuning puts in the place of its own lines."""
    script = block(GUIDE, "file: train.py", "python")
    for first, after, heading in (
        ("config = LlamaConfig(", "optimizer = dmuon.Muon(", model),
        ("library = ", "global_batch = ", "text in train.py"),
    ):
        begin, end = script.index(first), script.index(after)
        script = script[:begin] + block(GUIDE, heading, "python") + script[end:]
    line = '        files = {"config.json": config.to_json_string().encode()}\n'
    assert line in script
    return script.replace(
        line, f"{line}        {block(GUIDE, 'add to files in train.py', 'python')}"
    )


def _write_tokenizer(folder: Path) -> None:
    """One as GPT-2 has it, of two files, that cuts text into bytes; each id is its byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    signs = {byte: chr(byte) for byte in shown}
    signs |= {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    vocab = {sign: byte for byte, sign in signs.items()} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')


def _ids(folder: Path) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(folder)("naïve = 1\n")["input_ids"])


def test_fine_tuning_begins_with_the_pretrained_loss_and_keeps_the_tokenizer(
    trained: tuple[Path, list[dict[int, float]]],
) -> None:
    folder, losses = trained
    tuned = _tuned("replace in train.py")
    tuned = tuned.replace("\nimport tempfile", f"\n{_OTHER_RATES}\nimport tempfile")
    (folder / "tune.py").write_text(tuned, encoding="utf-8")
    shutil.copytree(folder / "checkpoints" / "step-000060", folder / "pretrained")
    _write_tokenizer(folder / "pretrained")
    first = losses_of(
        run_forked(
            "torchrun --standalone --nproc-per-node 2 tune.py --steps 2 --folder tuned", folder
        )
    )[1]
    assert first < losses[0][1] * 0.7
    assert _ids(folder / "tuned" / "step-000002") == list("naïve = 1\n".encode())


@pytest.mark.parametrize("has_prefix", [True, False])
def test_gpt2_is_fine_tuned_by_whatever_names_its_weights_have(
    has_prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``GPT2Model`` saves without ``transformer.``, as the folders on the hub are."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=2,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        initializer_range=0.2,
    )
    model = transformers.GPT2LMHeadModel(config)
    (model if has_prefix else model.transformer).save_pretrained(tmp_path / "pretrained")
    with safetensors.safe_open(tmp_path / "pretrained" / "model.safetensors", "pt") as file:
        assert ("transformer.wte.weight" in file.keys()) == has_prefix  # noqa: SIM118
    _write_tokenizer(tmp_path / "pretrained")
    short = ('glob("*.py")', 'glob("a*.py")')  # of the text, to cut it in less time
    script = _tuned("GPT-2 in train.py").replace(*short)
    (tmp_path / "tune.py").write_text(script, encoding="utf-8")
    output = run_forked("torchrun --standalone --nproc-per-node 2 tune.py --steps 1", tmp_path)

    monkeypatch.chdir(tmp_path)
    data = {"torch": torch, "sysconfig": sysconfig, "Path": Path}
    exec(block(GUIDE, "text in train.py", "python").replace(*short), data)
    first = torch.randperm(len(data["rows"]), generator=torch.Generator().manual_seed(0))[:16]
    rows = data["rows"][first]
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert losses_of(output)[1] == pytest.approx(loss, abs=2e-4)
    assert _ids(tmp_path / "checkpoints" / "step-000001") == list("naïve = 1\n".encode())
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoints" / "step-000001")
    assert not torch.equal(saved.transformer.wte.weight, model.transformer.wte.weight)


_OTHER_RATES = f"""
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
{block(GUIDE, "other rates", "python")}
assert [group["lr"] for group in optimizer.param_groups] == [0.005, 1e-3]
scheduler.step()
assert [group["lr"] for group in optimizer.param_groups] == [0.01, 2e-3]
"""


_FACTORS_BY_ALGORITHM = f"""
{block(GUIDE, "factors", "python")}
def rates_of_groups():
    return [(group["algorithm"], group["lr"]) for group in optimizer.param_groups]

assert rates_of_groups() == [("adamw", 3e-3 / 20), ("muon", 0.02 / 10), ("adamw", 3e-3 / 20)]
{block(GUIDE, "other rates", "python")}
assert rates_of_groups() == [("adamw", 2e-3 / 20), ("muon", 0.01 / 10), ("adamw", 2e-3 / 20)]
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
    grouped = script.replace(line, f"{groups}{_FACTORS_BY_ALGORITHM}")
    (tmp_path / "grouped.py").write_text(grouped, encoding="utf-8")
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
