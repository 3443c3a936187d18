"""The result as a table for people."""

from collections.abc import Iterator
from typing import Any

from dmuon.bench.contenders import ADAMW, DMUON
from dmuon.bench.settings import Settings

NOTE = (
    "All times are ratios to the AdamW step of the same round on this (shared) machine; they say "
    "how the two compare here, not how fast either is."
)
_NAMES = {ADAMW: "fully_shard + AdamW", DMUON: "DMuon"}
_MIB = 2**20


def render(result: dict[str, Any], settings: Settings) -> str:
    """The whole report."""
    return "\n".join([*_head(result, settings), "", *_table(result), "", *_notes(result)])


def _head(result: dict[str, Any], settings: Settings) -> Iterator[str]:
    model = result["model"]
    reshard = "freed" if settings.reshard else "kept"
    yield (
        f"decoder of {model['parameters'] / 1e6:.1f}M parameters, {model['dedicated'] / 1e6:.1f}M "
        f"in {model['matrices']} matrices with owners; width {settings.width}, "
        f"{settings.layers} layers"
    )
    yield (
        f"{settings.tokens} tokens a step over all ranks ({settings.batch} x {settings.sequence}), "
        f"{settings.precision}, weights {reshard} between forward and backward, on "
        f"{result['device']} ({result['backend']}, {result['cores']} cores)"
    )
    yield (
        f"{settings.repeats} rounds, each {settings.steps} step(s) of either contender, in turns, "
        "in one process group"
    )
    yield NOTE


def _table(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'ranks':>5}  {'threads':>7}  {'contender':19}  {'step':>5}  {'quartiles':>12}  "
        f"{'min..max':>12}  {'forward':>7}  {'backward':>8}  {'optimizer':>9}"
    )
    for run in result["runs"]:
        for name in (ADAMW, DMUON):
            yield _row(run, name)


def _row(run: dict[str, Any], name: str) -> str:
    ratio = run["step_ratio"]
    step, quartiles, extremes = "1.00", "", ""
    if name == DMUON:
        step = f"{ratio['median']:.2f}"
        quartiles = "{:.2f}..{:.2f}".format(*ratio["quartiles"])
        extremes = f"{ratio['min']:.2f}..{ratio['max']:.2f}"
    forward, backward, optimizer = run["phases"][name].values()
    return (
        f"{run['ranks']:>5}  {run['threads']:>7}  {_NAMES[name]:19}  {step:>5}  {quartiles:>12}  "
        f"{extremes:>12}  {forward:>7.2f}  {backward:>8.2f}  {optimizer:>9.2f}"
    )


def _notes(result: dict[str, Any]) -> Iterator[str]:
    model = result["model"]
    yield (
        "step: median over rounds, slowest rank. Phases: mean over ranks; waiting for other ranks "
        "counts where it happens."
    )
    yield (
        f"Newton-Schulz adds {model['newton_schulz_per_flop']:.0%} to the arithmetic of a step of "
        "this size; more tokens a step make that smaller."
    )
    for run in result["runs"]:
        yield (
            f"Newton-Schulz, {_ranks(run)}: the optimizer phase takes "
            f"{run['optimizer_per_products']:.2f} times as long as its matrix products alone"
        )
    for run in result["runs"]:
        yield from _memory(run)
    for run in result["runs"]:
        yield _wire(run, model["dedicated_bytes"])
    for run in result["runs"]:
        yield _parity(run)
    if len(result["runs"]) > 1:
        yield (
            "parity, between numbers of ranks: losses of the same step differ by at most "
            f"{result['loss_difference_between_ranks']:.1e} nats"
        )


def _memory(run: dict[str, Any]) -> Iterator[str]:
    peaks = run["peak_bytes"]
    if None in peaks.values():  # a CPU, where nobody counts
        return
    shown = ", ".join(f"{_NAMES[name]} {peak / _MIB:.0f} MiB" for name, peak in peaks.items())
    yield (
        f"memory, {_ranks(run)}: peak of a rank in training {shown} "
        f"({peaks[DMUON] / peaks[ADAMW]:.2f}x)"
    )


def _wire(run: dict[str, Any], dedicated_bytes: int) -> str:
    kinds = [
        f"{kind} {number / _MIB:.2f} MiB ({number / dedicated_bytes:.2f}x)"
        for kind, number in run["wire_bytes"].items()
    ]
    return (
        f"wire, {_ranks(run)}: {', '.join(kinds) or 'nothing'} a step and rank, payload "
        f"counted by DMuon (x of its {dedicated_bytes / _MIB:.2f} MiB of matrices; broadcast floor "
        f"{run['broadcast_floor_bytes'] / _MIB:.2f} MiB)"
    )


def _parity(run: dict[str, Any]) -> str:
    parity = run["parity"]
    curves = ", ".join(
        f"{_NAMES[name]} {losses[0]:.3f} -> {losses[-1]:.3f}"
        for name, losses in run["losses"].items()
    )
    bad = [name.replace("_", " ") for name, holds in parity.items() if not holds]
    verdict = "same start, finite, falling" if not bad else f"NOT {', NOT '.join(bad)}"
    return f"parity, {_ranks(run)}: {verdict}; loss {curves} in {_steps(run)} steps"


def _steps(run: dict[str, Any]) -> int:
    return len(run["losses"][DMUON])


def _ranks(run: dict[str, Any]) -> str:
    return "1 rank" if run["ranks"] == 1 else f"{run['ranks']} ranks"
