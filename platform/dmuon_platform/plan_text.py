"""A forecast as text for people."""

from collections.abc import Iterator
from dataclasses import fields

import dmuon
from dmuon_platform.spec import JobSpec
from dmuon_platform.text_table import text_table

_TIMES = {
    "compute": "forward and backward",
    "exposed": "communication that is waited for",
    "newton_schulz": "Newton-Schulz, busiest owner",
    "elementwise": "rest of the optimizer",
    "total": "step",
}


def plan_text(spec: JobSpec, forecast: "dmuon.Forecast") -> str:
    """Return the plan of a job as paragraphs and tables."""
    parts = [_head(spec, forecast), _owners(forecast), _traffic(forecast), _memory(forecast)]
    if forecast.time is not None:
        parts.append(_time(forecast))
    parts.append("\n".join(_conclusions(forecast)))
    return "\n\n".join(parts)


def _head(spec: JobSpec, forecast: "dmuon.Forecast") -> str:
    dedicated = sum(matrix.numel for matrix in forecast.owners.matrices)
    return (
        f"{spec.name}: {forecast.shape.numel:,} parameters, {dedicated:,} of them in "
        f"{len(forecast.owners.matrices):,} hidden matrices\n"
        f"{forecast.mesh.size:,} workers: mesh {forecast.mesh} (replicate x shard), each "
        f"{forecast.workload.num_micro_batches} x {spec.train.micro_batch_size} sequences of "
        f"{spec.data.sequence_length:,} tokens a step"
    )


def _owners(forecast: "dmuon.Forecast") -> str:
    matrices, flops = forecast.matrices_per_rank, forecast.flops_per_rank
    gflop = (f"{each / 1e9:,.1f}" for each in (flops.least, flops.mean, flops.most))
    rows = [
        ("matrices", f"{matrices.least:,.0f}", f"{matrices.mean:,.1f}", f"{matrices.most:,.0f}"),
        ("Newton-Schulz GFLOP", *gflop),
    ]
    return text_table(("OWNED BY A RANK", "LEAST", "MEAN", "MOST"), rows)


def _traffic(forecast: "dmuon.Forecast") -> str:
    header = ["SENT BY A RANK A STEP", "ALONG", "CALLS", "PAYLOAD", "WITHIN", "BETWEEN MACHINES"]
    is_timed = forecast.cluster is not None
    rows = []
    for who, found in (("", forecast.traffic), ("AdamW-FSDP2: ", forecast.adamw_traffic)):
        for each in found:
            links = [f"{each.intra / 1e6:,.1f} MB", f"{each.inter / 1e6:,.1f} MB"]
            row = [f"{who}{each.purpose}", each.axis, f"{each.calls:,}"]
            row += [f"{each.payload / 1e6:,.1f} MB", *(links if is_timed else [])]
            rows.append([*row, *([f"{each.seconds * 1e3:,.2f} ms"] if is_timed else [])])
    if not rows:
        return "One worker communicates nothing."
    table = text_table([*header, "TAKES"] if is_timed else header[:4], rows)
    return f"{table}\n{_packing(forecast)}" if forecast.owners.matrices else table


def _packing(forecast: "dmuon.Forecast") -> str:
    num_blocks = sum(1 for block in forecast.shape.blocks if block.matrices)
    return (
        f"{forecast.num_whole_blocks:,} of {num_blocks:,} blocks with hidden matrices travel whole "
        "along shard (one all-gather, one reduce-scatter), the others owner by owner."
    )


def _memory(forecast: "dmuon.Forecast") -> str:
    columns = (forecast.memory, forecast.least_memory, forecast.adamw_memory)
    is_small = max(column.total for column in columns) < 2**30
    unit, num_bytes = ("MIB", 2**20) if is_small else ("GIB", 2**30)
    names = [field.name for field in fields(columns[0])]
    rows = [
        (
            f"{name} (estimate)" if name == "activations" else name,
            *(f"{getattr(column, name) / num_bytes:,.3f}" for column in columns),
        )
        for name in (*names, "total")
    ]
    return text_table((f"{unit} OF A RANK", "FULLEST OWNER", "EMPTIEST OWNER", "ADAMW-FSDP2"), rows)


def _time(forecast: "dmuon.Forecast") -> str:
    assert forecast.time is not None
    rows = [
        (
            what,
            f"{getattr(forecast.time, name) * 1e3:,.2f}",
            f"{getattr(forecast.adamw_time, name) * 1e3:,.2f}",
        )
        for name, what in _TIMES.items()
    ]
    return text_table(("MS OF A STEP", "DMUON", "ADAMW-FSDP2"), rows)


def _conclusions(forecast: "dmuon.Forecast") -> Iterator[str]:
    yield (
        f"Busiest owner {forecast.imbalance:.3f} x the mean work; Newton-Schulz is "
        f"{forecast.newton_schulz_share:.2%} of all operations."
    )
    if forecast.overhead is not None:
        yield f"A step takes {_as_long(forecast.overhead)} with AdamW under FSDP2."
        yield f"It is limited by {forecast.limit}."
    for line in forecast.advice:
        yield f"- {line}."


def _as_long(overhead: float) -> str:
    if overhead >= 1:
        return f"{1 + overhead:.1f} times as long as"
    return f"{abs(overhead):.1%} {'longer' if overhead >= 0 else 'less'} than"
