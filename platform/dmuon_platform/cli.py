"""The command ``dmuon``: arguments in, an exit code out.

It imports what a command needs when that runs, so that help is there at once.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon_platform import option_values as read
from dmuon_platform.errors import PlatformError, exit_code_of
from dmuon_platform.output import lead_nowhere
from dmuon_platform.sweep.arguments import add_arguments as _add_sweep
from dmuon_platform.warning_text import sentences

if TYPE_CHECKING:
    from dmuon_platform.spec import JobSpec

    Commands = argparse._SubParsersAction["_Subcommand"]

Command = Callable[[argparse.Namespace], int]

NOBODY_READS = 141
"""Exit code when the reader of our output is gone, as shells have it."""

BAD_USAGE = 2
"""Exit code of a command line that argparse refuses, and of one without a command."""

RUN_COMMANDS = {
    "status": "show how a run stands: step, loss, speed, workers, checkpoint, restarts",
    "logs": "tell what happened to a run",
    "stop": "ask a run to save a checkpoint and end",
    "resume": "go on with a run, from the job that it has recorded",
    "runs": "list all runs",
    "plot": "draw a run's pictures: loss, learning rates, times, owners, Muon's updates",
    "report": "write a run as one page of HTML: how it went, and whether Muon is healthy",
}

SETTINGS: dict[str, Any] = {
    "action": "extend",
    "nargs": "+",
    "default": [],
    "metavar": "KEY=VALUE",
    "help": "change the job: --set train.steps=50 optimizer.lr=0.01",
}
"""Of the option ``--set``."""


_FLAG = {"action": "store_true"}
RUN_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--storage": (
        "status logs stop resume runs plot report",
        {"default": "runs", "help": "the folder of all runs; default: runs"},
    ),
    "--address": (
        "status logs stop resume",
        {"help": "through this job server instead: http://HOST:8265"},
    ),
    "--json": ("status runs", {**_FLAG, "help": "for programs: JSON, times in seconds"}),
    "--watch": ("status", {**_FLAG, "help": "again and again until it ends"}),
    "--every": (
        "status",
        {"type": read.seconds, "default": 5.0, "help": "seconds between two looks; default: 5"},
    ),
    "--follow": ("logs resume", {**_FLAG, "help": "show it until the run ends"}),
    "--wait": ("stop", {**_FLAG, "help": "return when it has ended"}),
    "--reason": ("stop", {"default": "dmuon stop", "help": "for its journal"}),
    "--set": ("resume", SETTINGS),
    "--output": ("plot", {"type": Path, "help": "a folder; default: plots in that of the run"}),
    "--out": ("report", {"type": Path, "help": "a file; default: report.html in that of the run"}),
    "--traceback": (
        "status logs stop resume runs plot report",
        {**_FLAG, "help": "show where an error arose"},
    ),
}
"""Options of `RUN_COMMANDS`: which of them take it, and how it is read."""


class _Subcommand(argparse.ArgumentParser):
    """Shows its own usage for what it does not know, where argparse shows that of ``dmuon``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Version(argparse.Action):
    """Prints our version and that of what decides how a run behaves."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from dmuon_platform.versions import versions_text

        print(versions_text())
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or that of the `PlatformError`."""
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not given:  # a first look
        parser.print_help(sys.stderr)
        return BAD_USAGE
    arguments = parser.parse_args(given)
    try:
        with sentences():
            code: int = arguments.command(arguments)
    except PlatformError as error:
        if arguments.traceback:
            traceback.print_exc()
        else:
            print(f"dmuon: {error}", file=sys.stderr)
        code = exit_code_of(error)
    except KeyboardInterrupt as error:
        print("dmuon: interrupted; the same command goes on from here", file=sys.stderr)
        code = exit_code_of(error)
    except BrokenPipeError:  # `dmuon logs mine | head`: the reader has seen enough
        lead_nowhere(sys.stdout.fileno())
        code = NOBODY_READS
    except Exception as error:  # a bug of ours, so the trace is what helps
        traceback.print_exc()
        code = exit_code_of(error)
    return code


def _run(arguments: argparse.Namespace) -> int:
    spec = _job(arguments)
    from dmuon_platform.driver_lease import refuse_while_locked
    from dmuon_platform.spec.resume import base_folder

    refuse_while_locked(spec.anchored(base_folder()).run_dir)
    from dmuon_platform.launch import run_job  # needs torch and Ray, which takes a while

    run_job(spec)
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from dmuon_platform.submission import submit_job

    return submit_job(arguments.job, arguments.set, arguments.address, follow=arguments.follow)


def _validate(arguments: argparse.Namespace) -> int:
    spec = _job(arguments)
    from dmuon_platform.outline import outline

    print(outline(spec))
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from dmuon_platform.spec import JobSpec
    from dmuon_platform.spec.reference import reference

    if arguments.markdown:
        print(reference(), end="")
    else:
        print(json.dumps(JobSpec.model_json_schema(), indent=2))
    return 0


def _init(arguments: argparse.Namespace) -> int:
    from dmuon_platform import job_draft

    return job_draft.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from dmuon_platform import doctor

    return doctor.run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    spec = _job(arguments)
    from dmuon_platform import plan_command

    return plan_command.run(spec, arguments)


def _chaos(arguments: argparse.Namespace) -> int:
    from dmuon_platform import chaos

    return chaos.run(arguments)


def _sweep(arguments: argparse.Namespace) -> int:
    from dmuon_platform.sweep import command

    return command.run(arguments)


def _bench_recovery(arguments: argparse.Namespace) -> int:
    from dmuon_platform import recovery_bench

    return recovery_bench.run(arguments)


def _on_run(action: str) -> Command:
    def act(arguments: argparse.Namespace) -> int:
        from dmuon_platform import run_commands

        command: Command = getattr(run_commands, action)
        return command(arguments)

    return act


def _checkpoint(arguments: argparse.Namespace) -> int:
    from dmuon_platform.checkpoint_command import run  # needs torch

    return run(arguments)


def _job(arguments: argparse.Namespace) -> "JobSpec":
    from dmuon_platform.spec import load_job

    overrides, options = list(arguments.set), {}
    for name in ("address", "workers"):
        if (value := getattr(arguments, name, None)) is not None:
            overrides.append(f"resources.{name}={value}")
            options[f"resources.{name}"] = f"--{name}"
    return load_job(arguments.job, overrides, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dmuon",
        description="Train language models with Muon on many machines: a job file in, a trained, "
        "tracked and registered model out.",
        epilog="Exit codes: 0 done, 75 stopped on request or the cluster is gone (run again to go "
        "on), 130 interrupted (the same), 3 the run goes on already, 66 no such run, 69 no cluster "
        "at the address, 78 the job is wrong, 86 diverged, 70 a bug, 1 gave up.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show it, and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Subcommand)
    _add_job_commands(commands)
    schema = commands.add_parser("schema", help="print the JSON schema of job files")
    schema.add_argument("--markdown", action="store_true", help="tables for readers instead")
    init = commands.add_parser("init", help="write a first job file for your data and hardware")
    _add_init(init)
    doctor = commands.add_parser("doctor", help="look whether this machine can train")
    _add_doctor(doctor)
    _set_actions({schema: _schema, init: _init, doctor: _doctor})
    for name, text in RUN_COMMANDS.items():
        _add_run_command(name, commands.add_parser(name, help=text))
    _add_checkpoint(commands.add_parser("checkpoint", help="look at checkpoints, and export them"))
    return parser


def _add_job_commands(commands: "Commands") -> None:
    """Add what reads a job file, which settings can change."""
    run = commands.add_parser("run", help="run a job here, or go on with it")
    run.add_argument("--address", help="a Ray cluster, host:port or auto; default: a local one")
    submit = commands.add_parser("submit", help="hand a job to a Ray cluster, and leave")
    submit.add_argument("--address", required=True, help="its job server: http://127.0.0.1:8265")
    submit.add_argument("--follow", action="store_true", help="show its output until it ends")
    submit.epilog = (
        "Exit codes: 0 once the job is handed over, and when Ctrl-C ends --follow; with --follow "
        "else what `dmuon status RUN --address` ends with after the job. 3 the run goes on already,"
        " 69 no job server answers, 78 the job is wrong."
    )
    validate = commands.add_parser("validate", help="check a job and show its plan; start nothing")
    plan = commands.add_parser("plan", help="foretell what a step costs on many workers")
    _add_plan(plan)
    sweep = commands.add_parser("sweep", help="train a job with many settings, and compare")
    _add_sweep(sweep)
    chaos = commands.add_parser("chaos", help="run a job under random faults, and compare")
    _add_chaos(chaos)
    bench = commands.add_parser("bench-recovery", help="time a job's way back from faults")
    kinds = "what strikes: kill,freeze,stall,kill_driver by default"
    bench.add_argument("--kinds", action=read.Once, help=kinds)
    bench.add_argument("--json", action="store_true", help="for programs: JSON, in seconds")
    actions: dict[argparse.ArgumentParser, Command] = {run: _run, submit: _submit, plan: _plan}
    actions |= {validate: _validate, chaos: _chaos, bench: _bench_recovery, sweep: _sweep}
    for command in actions:
        command.add_argument("job", metavar="JOB", help="a TOML, YAML or JSON file")
        command.add_argument("--set", **SETTINGS)
    _set_actions(actions)


def _set_actions(actions: Mapping[argparse.ArgumentParser, Command]) -> None:
    for command, action in actions.items():
        command.add_argument("--traceback", action="store_true", help="show where an error arose")
        command.set_defaults(command=action)


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a new .toml file; its name is the run's")
    parser.add_argument(
        "--data",
        action="extend",
        nargs="+",
        help="after FILE: files or globs of text, JSONL or Parquet; default: Python's own library",
    )
    parser.add_argument(
        "--text-field", help="of JSONL or Parquet; default: the only one with text, or text"
    )
    parser.add_argument("--model", help="a Hugging Face folder to fine-tune; default: from scratch")
    parser.add_argument(
        "--tokenizer",
        help="a tokenizer.json, or bytes; default: that of --model, or one token a byte",
    )
    parser.add_argument(
        "--workers", type=read.count, help="default: one a GPU, or a core of up to four"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit codes: 0 a training can run, 1 something must be mended first."
    parser.add_argument("--storage", default="runs", help="the folder of all runs; default: runs")
    parser.add_argument("--address", help="a Ray cluster, or http://HOST:8265 of its job server")
    parser.add_argument("--tracking-uri", help="of MLflow; default: a database in --storage")
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Starts nothing and needs neither GPUs nor data. Times are of the best case, in which "
        "collectives run under forward and backward. Exit codes: 0, 78 it does not fit the job."
    )
    add = parser.add_argument
    add("--workers", type=read.whole, metavar="N", help="default: the most that the job allows")
    add("--gpu", metavar="NAME", help="for times: a100, h100, h200, b200 or mi300x")
    add("--intra", metavar="RATE", help="of a GPU within its machine, one way: 450GB/s")
    add("--inter", metavar="RATE", help="of a GPU to other machines; default: 50GB/s")
    add("--gpus-per-node", type=read.whole, default=8, metavar="G", help="in a machine; default: 8")
    add("--achieved", type=read.number, default=0.4, help="part of the peak reached; default: 0.4")
    add("--json", type=Path, metavar="FILE", help="write it for programs, in bytes and seconds")


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit codes: 0 every claim holds, 1 one does not; see what is printed."
    parser.add_argument(
        "--minutes", type=read.number, default=10.0, help="begin no round after them; default: 10"
    )
    parser.add_argument("--seed", type=read.whole, default=0, help="of the faults; default: 0")
    parser.add_argument("--faults", type=read.count, default=6, help="in one round; default: 6")


def _add_run_command(name: str, parser: argparse.ArgumentParser) -> None:
    if name != "runs":
        parser.add_argument("run", metavar="RUN", help="a run's name or folder, or its job file")
    if name == "status":
        parser.epilog = (
            "Exit codes: 0 finished, 3 running or to be launched, 75 stopped or interrupted "
            "(launch it again), 66 no such run, 69 no job server answers; a failed run's own: "
            "1, 69, 70, 78, 86."
        )
    for option, (names, settings) in RUN_OPTIONS.items():
        if name in names.split():
            parser.add_argument(option, **settings)
    parser.set_defaults(command=_on_run(name))


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit codes: 0 good, 1 damaged, unfinished or different, 2 it cannot be done as asked."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="the checkpoints in a folder, oldest first")
    listing.add_argument("folder", metavar="FOLDER", help="that checkpoints are in, or a run's")
    listing.add_argument(
        "--newest", type=read.count, metavar="N", help="only N of the highest steps, which is fast"
    )
    show = actions.add_parser("show", help="what a checkpoint holds")
    show.add_argument("path", metavar="CHECKPOINT")
    verify = actions.add_parser("verify", help="compare every byte with what was written")
    verify.add_argument("path", metavar="CHECKPOINT", nargs="+")
    export = actions.add_parser("export", help="write the weights for other programs")
    export.add_argument("path", metavar="CHECKPOINT")
    export.add_argument(
        "target",
        metavar="TARGET",
        help="a new folder for a Hugging Face checkpoint, or a new .safetensors, .pt or .bin file",
    )
    export.add_argument(
        "--max-shard-mib",
        type=read.count,
        default=5120,
        help="of one file in the folder; default 5120",
    )
    copy = actions.add_parser("copy", help="to or from other storage, such as s3://bucket/folder")
    copy.add_argument("source", metavar="SOURCE", help="a checkpoint: a folder, or a URL")
    copy.add_argument("target", metavar="TARGET", help="a new folder, or the URL of one")
    diff = actions.add_parser("diff", help="what differs between two checkpoints")
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help="a checkpoint, or other weights")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="for programs: JSON, in bytes")
        action.add_argument("--traceback", action="store_true", help="show where an error arose")
    parser.set_defaults(command=_checkpoint)


if __name__ == "__main__":
    sys.exit(main())
