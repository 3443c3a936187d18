"""The result as a table for people."""

from collections.abc import Iterator
from typing import Any

from dmuon.bench.settings import (
    ADAMW,
    ALLTOALL,
    ALONE,
    DMUON,
    GATHER,
    MUON_FSDP2,
    TORCH_MUON,
    Settings,
)

NOTE = (
    "All times but CPU seconds are ratios to the AdamW step of the same round on this (shared) "
    "machine; they say how the contenders compare here, not how fast any is."
)
_NAMES = {
    ADAMW: "fully_shard + AdamW",
    DMUON: "DMuon",
    GATHER: "Muon, gathering",
    ALLTOALL: "Muon, all-to-all",
    MUON_FSDP2: "muon-fsdp2",
    TORCH_MUON: "torch.optim.Muon",
    ALONE: "no communication",
}
_MIB = 2**20


def render(result: dict[str, Any], settings: Settings) -> str:
    """The whole report."""
    return "\n".join([*_head(result, settings), "", *_table(result), "", *_notes(result, settings)])


def _head(result: dict[str, Any], settings: Settings) -> Iterator[str]:
    model = result["model"]
    reshard = "freed" if settings.reshard else "kept"
    yield (
        f"decoder of {model['parameters'] / 1e6:.1f}M parameters, {model['dedicated'] / 1e6:.1f}M "
        f"in {model['matrices']} matrices with owners; width {settings.width}, "
        f"{settings.layers} layers"
    )
    of_whom = "of each rank" if settings.weak else "over all ranks"
    yield (
        f"{settings.batch * settings.sequence} tokens a step {of_whom} ({settings.batch} x "
        f"{settings.sequence}), "
        f"{settings.precision}, Newton-Schulz in {settings.ns_dtype or 'its default dtype'}, "
        f"weights {reshard} between forward and backward, on "
        f"{result['device']} ({result['backend']}, {result['cores']} cores, load "
        f"{result['load']:.1f} at the start)"
    )
    yield (
        f"{settings.repeats} rounds, each {settings.steps} step(s) of every contender, in turns, "
        "in one process group"
    )
    yield NOTE


def _table(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'ranks':>5}  {'threads':>7}  {'contender':19}  {'step':>5}  {'10..90 %':>11}  "
        f"{'forward':>7}  {'backward':>8}  {'optimizer':>9}  {'CPU s':>6}  {'payload':>8}  "
        f"{'sent':>7}  {'peak':>7}"
    )
    for run in result["runs"]:
        for name in run["phases"]:
            yield _row(run, name)


def _row(run: dict[str, Any], name: str) -> str:
    step, tenths = "1.00", ""
    if name != ADAMW:
        step = f"{run['step_ratio'][name]['median']:.2f}"
        tenths = "{:.2f}..{:.2f}".format(*run["step_ratio"][name]["tenths"])
    forward, backward, optimizer = run["phases"][name].values()
    payload = sum(run["payload_bytes"][name].values()) / _MIB
    sent = run["sent_bytes"][name]
    return (
        f"{run['ranks']:>5}  {run['threads']:>7}  {_NAMES[name]:19}  {step:>5}  {tenths:>11}  "
        f"{forward:>7.2f}  {backward:>8.2f}  {optimizer:>9.2f}  "
        f"{sum(run['cpu_seconds'][name].values()):>6.2f}  {payload:>8.1f}  "
        f"{'' if sent is None else format(sent / _MIB, '.1f'):>7}  "
        f"{run['peak_bytes'][name] / _MIB:>7.1f}"
    )


def _notes(result: dict[str, Any], settings: Settings) -> Iterator[str]:
    yield (
        "step: median over rounds, slowest rank. Phases: mean over ranks; waiting for other ranks "
        "counts where it happens. CPU s: of a step, all ranks together."
    )
    yield (
        "payload: MiB of a step that a rank hands to collectives, of each the larger of what goes "
        "in and comes out; sent: MiB of a step that the kernel sent on TCP, all ranks together; "
        "peak: MiB of tensors in training, the fullest rank."
    )
    runs = result["runs"]
    for run in runs:
        if run["ranks"] * run["threads"] > result["cores"] and result["device"] == "cpu":
            yield (
                f"{_ranks(run)} with {run['threads']} thread(s) take turns at {result['cores']} "
                "cores here: their times say little of ranks that have cores of their own"
            )
    for share in dict.fromkeys(f"{run['newton_schulz_per_flop']:.0%}" for run in runs):
        yield (
            f"Newton-Schulz adds {share} to the arithmetic of a step of this size; more tokens a "
            "step make that smaller."
        )
    for run in runs:
        yield (
            f"Newton-Schulz, {_ranks(run)}: the optimizer phase takes "
            f"{run['optimizer_per_products']:.2f} times as long as its matrix products alone, "
            "which no Muon does without"
        )
    for line in (_best_other, _memory, _sent, _parity):
        yield from (text for run in runs if (text := line(run)))
    for run in runs:
        yield _wire(run, result["model"]["dedicated_bytes"])
    if len(runs) > 1:
        yield from _between_runs(result, settings)


def _best_other(run: dict[str, Any]) -> str | None:
    best = run["best_other"]
    if best is None:
        return None
    step, optimizer = best["step_ratio"], best["optimizer_ratio"]
    return (
        f"DMuon over the best other Muon ({_NAMES[best['name']]}) in the same round, "
        f"{_ranks(run)}: step {_with_spread(step)}, optimizer phase of the slowest rank "
        f"{_with_spread(optimizer)}"
    )


def _with_spread(ratio: dict[str, Any]) -> str:
    low, high = ratio["tenths"]
    return f"{ratio['median']:.2f} ({low:.2f}..{high:.2f})"


def _memory(run: dict[str, Any]) -> str:
    return f"memory, {_ranks(run)}: {_over_adamw(run['peak_bytes'])}"


def _sent(run: dict[str, Any]) -> str | None:
    if not run["sent_bytes"][ADAMW]:  # not counted, or a rank alone
        return None
    return f"sent, {_ranks(run)}: {_over_adamw(run['sent_bytes'])}"


def _over_adamw(numbers: dict[str, float]) -> str:
    unit = numbers[ADAMW]
    ratios = (f"{_NAMES[n]} {each / unit:.2f}x" for n, each in numbers.items() if n != ADAMW)
    return f"{', '.join(ratios)} of {_NAMES[ADAMW]}"


def _wire(run: dict[str, Any], dedicated_bytes: int) -> str:
    kinds = [
        f"{kind} {number / _MIB:.2f} MiB ({number / dedicated_bytes:.2f}x)"
        for kind, number in run["wire_bytes"].items()
    ]
    return (
        f"wire, {_ranks(run)}: {', '.join(kinds) or 'nothing'} a step and rank, payload "
        f"counted by DMuon (x of its {dedicated_bytes / _MIB:.2f} MiB of matrices; for all ranks "
        f"to see all {run['broadcast_floor_bytes'] / _MIB:.2f} MiB of broadcasts are needed)"
    )


def _parity(run: dict[str, Any]) -> str:
    parity = run["parity"]
    curves = ", ".join(
        f"{_NAMES[name]} {losses[0]:.3f} -> {losses[-1]:.3f}"
        for name, losses in run["losses"].items()
    )
    bad = [name.replace("_", " ") for name, holds in parity.items() if not holds]
    verdict = "same start, finite, falling" if not bad else f"NOT {', NOT '.join(bad)}"
    weights = "".join(
        f"; weights of {_NAMES[name]} differ from DMuon's by {each:.1e} of their change (at most "
        f"{run['tolerances'][name]:g})"
        for name, each in run["differences"].items()
    )
    return f"parity, {_ranks(run)}: {verdict}; loss {curves} in {_steps(run)} steps{weights}"


def _between_runs(result: dict[str, Any], settings: Settings) -> Iterator[str]:
    numbers = ", ".join(str(run["ranks"]) for run in result["runs"])
    kind = "weak" if settings.weak else "strong"
    for name, speeds in result["scaling"].items():
        shown = ", ".join(f"{speed:.2f}" for speed in speeds)
        yield f"{kind} scaling, {_NAMES[name]}: tokens a second with {numbers} ranks: {shown}"
    if not settings.weak:
        yield (
            "parity, between numbers of ranks: losses of the same step differ by at most "
            f"{result['loss_difference_between_ranks']:.1e} nats"
        )


def _steps(run: dict[str, Any]) -> int:
    return len(run["losses"][DMUON])


def _ranks(run: dict[str, Any]) -> str:
    return "1 rank" if run["ranks"] == 1 else f"{run['ranks']} ranks"
