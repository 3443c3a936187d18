"""A run as one page of HTML: what it was, how it went, and whether Muon was healthy in it.

The page needs nothing else: no network, no script, no other file. Pictures are drawn into it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import median

from dmuon_platform.durable_file import write_whole
from dmuon_platform.errors import SpecError
from dmuon_platform.event_facts import clock, duration, number
from dmuon_platform.health import VERDICTS, Finding, Grade, findings_of, verdict
from dmuon_platform.metric_names import (
    BIGRAM_BITS_PER_BYTE,
    BITS_PER_BYTE,
    EVALUATION_LOSS,
    TOKENS_PER_S,
    TRAIN_LOSS,
)
from dmuon_platform.picture import Picture
from dmuon_platform.plots import pictures_of
from dmuon_platform.report_style import STYLE
from dmuon_platform.report_tables import (
    MARKS,
    facts_table,
    findings_list,
    matrices_table,
    owners_table,
    starts_table,
)
from dmuon_platform.run_ending import State
from dmuon_platform.run_folder import JOB_FILE, REPORT_FILE
from dmuon_platform.run_history import MOST_POINTS, Curve, RunHistory, read_history
from dmuon_platform.run_state import RunState, read_run
from dmuon_platform.run_story import restarts_of
from dmuon_platform.spec import JobSpec, load_job
from dmuon_platform.training_starts import GONE, starts_of
from dmuon_platform.wall_time import WallTime, wall_time

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched and nothing runs, whatever a run may be called."""

_STATES = {State.FINISHED: Grade.GOOD, State.FAILED: Grade.BAD, State.RUNNING: Grade.UNKNOWN}


def write_report(
    folder: Path, file: Path | None = None, ended: tuple[State, str | None] | None = None
) -> Path:
    """Write the report of a run; return its file.

    Args:
        folder: Of the run.
        file: Where to; by default ``report.html`` in the folder.
        ended: How the run ends and why, from a driver that is still alive to say so.

    Raises:
        OSError: It cannot be written, or the run not be read.
    """
    now = time.time()
    run = read_run(folder, now)
    if ended is not None:
        run = replace(run, state=ended[0], problem=ended[1], workers=())
    history = read_history(folder, now if run.state is State.RUNNING else None)
    file = folder / REPORT_FILE if file is None else file
    write_whole(file, report_page(run, history, _job(folder), now))
    return file


def report_page(run: RunState, history: RunHistory, spec: JobSpec | None, now: float) -> str:
    """Return the page."""
    findings = findings_of(history, run.state, run.problem)
    parts = [
        *_head(run, history, findings, spec),
        "<h2>Health</h2>",
        findings_list(findings),
        *_pictures(history),
        *_tables(run, history, spec),
        *_notes(run, history),
        f'<p class="soft">Drawn {clock(now)} from the files in '
        f"<code>{escape(str(run.folder))}</code> by <code>dmuon report</code>.</p>",
    ]
    title, body = escape(f"{run.name}: report"), "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><title>{title}</title>\n<style>{STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _job(folder: Path) -> JobSpec | None:
    try:
        return load_job(folder / JOB_FILE)
    except (SpecError, OSError, ValueError):
        return None  # the state of the run has a note about it


def _head(
    run: RunState, history: RunHistory, findings: list[Finding], spec: JobSpec | None
) -> Iterator[str]:
    grade, times = verdict(findings), wall_time(history)
    state = MARKS[_STATES.get(run.state, Grade.LOOK)]
    yield (
        f'<div class="head"><h1>{escape(run.name)}</h1>'
        f'<span class="badge {state}">{escape(str(run.state))}</span>'
        f'<span class="badge {MARKS[grade]}">Muon and training: {VERDICTS[grade]}</span></div>'
    )
    yield f"<p>{escape(' '.join(_sentences(run, history, times)))}</p>"
    if run.problem:
        yield f'<p class="bad">{escape(" ".join(run.problem.split()))}</p>'
    tiles = [
        f'<div class="card tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in _tiles(run, history, times, spec)
    ]
    yield f'<div class="tiles">{"".join(tiles)}</div>'


def _sentences(run: RunState, history: RunHistory, times: WallTime) -> Iterator[str]:
    of = "" if run.num_steps is None else f" of {run.num_steps:,}"
    yield f"{run.step:,}{of} steps are done, in {duration(times.total)} of wall time."
    first, last = _first_loss(history), run.metrics.get(TRAIN_LOSS)
    if first is not None and last is not None:
        yield f"The training loss was {first:.3f} in the first step, and {last:.3f} in the last."
    if EVALUATION_LOSS in run.evaluation:
        yield _held_out(run, history)
    count = restarts_of(history.events)
    how_often = "started again once" if count == 1 else f"started again {count:,} times"
    yield f"The training was {how_often if count else 'never started again'} after a fault."
    if count and run.restarts:
        newest = run.restarts[-1]
        yield f"The newest failure, after step {newest.step}: {newest.cause.rstrip('.')}."
    if times.goodput is not None:
        yield f"Goodput is {100 * times.goodput:.0f} %, the part of that time in steps that count."


def _held_out(run: RunState, history: RunHistory) -> str:
    step = run.evaluation["step"]
    text = f"The held-out loss is {run.evaluation[EVALUATION_LOSS]:.3f}"
    bits = run.evaluation.get(BITS_PER_BYTE)
    bigram = run.evaluation.get(BIGRAM_BITS_PER_BYTE)
    if bits is not None and bigram is not None:
        text += f", {bits:.3f} bits per byte, where a bigram model has {bigram:.3f}"
    text += f" (step {step:.0f})"
    start = _start(history) if step else ""
    return text + (f"; before the first step {start}." if start else ".")


def _start(history: RunHistory) -> str:
    keys = {EVALUATION_LOSS: "", BITS_PER_BYTE: " bits per byte"}
    found = {unit: history.curves.get(key, Curve()).at(0) for key, unit in keys.items()}
    return ", ".join(f"{value:.3f}{unit}" for unit, value in found.items() if value is not None)


def _tiles(
    run: RunState, history: RunHistory, times: WallTime, spec: JobSpec | None
) -> Iterator[tuple[str, str]]:
    of = "" if run.num_steps is None else f" of {run.num_steps:,}"
    yield f"steps{of}", f"{run.step:,}"
    if spec is not None:
        yield "tokens", f"{run.step * spec.tokens_per_step:,}"
    if (loss := run.metrics.get(TRAIN_LOSS)) is not None:
        yield "training loss of the last step", f"{loss:.4f}"
    if (loss := run.evaluation.get(EVALUATION_LOSS)) is not None:
        yield "held-out loss", f"{loss:.4f}"
    if history.is_known(TOKENS_PER_S):
        yield "tokens/s, median", f"{median(history.curves[TOKENS_PER_S].values):,.0f}"
    if times.goodput is not None:
        yield "goodput", f"{100 * times.goodput:.1f} %"
    yield "restarts", str(restarts_of(history.events))
    if history.updates is not None:
        yield "matrices of Muon", f"{len(history.updates[1].rows):,}"


def _pictures(history: RunHistory) -> Iterator[str]:
    pictures = list(pictures_of(history))
    yield "<h2>Pictures</h2>"
    if not pictures:
        yield '<p class="card">No step is done yet: there is nothing to draw.</p>'
        return
    figures = [
        f'<figure class="card"><h3>{escape(each.title)}</h3>{each.markup(history)}'
        f"<figcaption>{escape(each.about + _thinning(each, history))}</figcaption></figure>"
        for each in pictures
    ]
    yield "\n".join(['<div class="pictures">', *figures, "</div>"])


def _thinning(picture: Picture, history: RunHistory) -> str:
    keys = [key for prefix in picture.keys for key in history.keys(prefix)]
    longest = max((len(history.curves[key].steps) for key in keys), default=0)
    size = math.ceil(longest / MOST_POINTS)
    if size <= 1 or not picture.is_thinned:
        return ""
    band = ", in a band from the least to the greatest" if picture.has_band else ""
    return f" Of {longest:,} steps, each point is the mean of {size} neighbours{band}."


def _tables(run: RunState, history: RunHistory, spec: JobSpec | None) -> Iterator[str]:
    yield "<h2>The run</h2>"
    yield facts_table(dict(_facts(run, history, spec)))
    if any(event["kind"] == "training_started" for event in history.events):
        yield "<h2>Starts of the training</h2>"
        now = "goes on" if run.state is State.RUNNING else _how_it_ended(run)
        yield starts_table(starts_of(history.events, now))
    if owners := owners_table(history.plan):
        yield "<h2>Owners</h2>"
        yield owners
    if history.updates is not None:
        step, found = history.updates
        yield f"<h2>Updates of the matrices at step {step:,}</h2>"
        yield (
            "<p>Of each orthogonalised update O, before the learning rate: <b>spectral norm</b>, "
            "its largest singular value; <b>orthogonality error</b>, the Frobenius norm of "
            "O O<sup>T</sup> - I on the smaller side m, over the square root of m. 0 is "
            "orthogonal, 1 is no update. Newton-Schulz brings the singular values of all "
            "directions that the gradient has to between "
            f"{found.band[0]:.2f} and {found.band[1]:.2f}, by its own polynomial (arXiv "
            "2505.16932).</p>"
        )
        yield matrices_table(history)


def _how_it_ended(run: RunState) -> str:
    return GONE if run.state is State.INTERRUPTED else run.problem or str(run.state)


def _facts(run: RunState, history: RunHistory, spec: JobSpec | None) -> Iterator[tuple[str, str]]:
    started = [event for event in history.events if event["kind"] == "training_started"]
    workers = started[-1].get("workers") if started else None
    num_workers = len(workers) if isinstance(workers, list) else None
    if spec is not None:
        yield "model", _model(spec, history)
        yield "mesh", _mesh(spec, num_workers)
        source = spec.data.source
        yield "data", source if isinstance(source, str) else ", ".join(source)
        yield (
            "batch",
            (
                f"{spec.train.global_batch_size:,} sequences of {spec.data.sequence_length:,} "
                f"tokens a step, {spec.train.precision}"
            ),
        )
        yield (
            "optimizer",
            (
                f"Muon: lr {spec.optimizer.lr:g}, momentum {spec.optimizer.momentum:g}, weight "
                f"decay {spec.optimizer.weight_decay:g}, {spec.optimizer.ns_steps} Newton-Schulz "
                f"steps; AdamW: lr {spec.optimizer.adamw_lr:g}"
            ),
        )
        yield "schedule", f"{spec.schedule.kind}, {spec.schedule.warmup_steps:,} steps of warm-up"
    if history.events:
        yield "launched", clock(number(history.events[0], "time"))
    yield "last sign", clock(run.time)
    if run.checkpoint is not None:
        yield "newest checkpoint", str(run.checkpoint.path)
    trained = [event for event in history.events if event["kind"] == "trained"]
    if trained:
        yield "weights SHA-256", str(trained[-1].get("weights_sha256"))
    if run.tracking.get("run_id"):
        yield "MLflow run", str(run.tracking["run_id"])


def _model(spec: JobSpec, history: RunHistory) -> str:
    model = spec.model
    text = model.path or (
        f"{model.name}, {model.num_hidden_layers} layers, width {model.hidden_size:,}, "
        f"feed-forward {model.intermediate_size:,}, {model.num_attention_heads} heads, vocabulary "
        f"{model.vocab_size:,}"
    )
    if matrices := history.plan.get("matrices"):
        numel = sum(math.prod(each["shape"]) for each in matrices)
        text += f"; {len(matrices):,} hidden parameters with {numel:,} weights are Muon's"
    return text


def _mesh(spec: JobSpec, num_workers: int | None) -> str:
    if num_workers is None:
        return "not known yet"
    replicate, shard = spec.resolve_mesh(num_workers)
    return f"{replicate} x {shard} (replicate x shard), {num_workers} workers"


def _notes(run: RunState, history: RunHistory) -> Iterator[str]:
    notes = list(dict.fromkeys([*run.notes, *history.notes]))
    if notes:
        lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
        yield f'<h2>Damaged or missing</h2><ul class="card look">{lines}</ul>'


def _first_loss(history: RunHistory) -> float | None:
    curve = history.curves.get(TRAIN_LOSS)
    return curve.values[0] if curve is not None else None
