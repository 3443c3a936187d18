"""What limits a planned step, and what would change that."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dmuon.partition import Matrix
from dmuon.planning.conduct import MeshShape
from dmuon.planning.step_time import operations

if TYPE_CHECKING:
    from dmuon.planning.forecast import Forecast

_WORTH_IT = 0.02  # of a step; less is within what a forecast can tell
_BALANCED = 1.1
_MOST_USED = 0.9  # of a GPU's memory; the rest is fragments, libraries and communicators


def limit_of(forecast: "Forecast") -> str | None:
    """What a step waits for most; None without a cluster."""
    time, cluster = forecast.time, forecast.cluster
    if time is None or cluster is None:
        return None
    if time.exposed <= max(time.compute, time.newton_schulz):
        return "compute" if time.compute >= time.newton_schulz else "Newton-Schulz"
    slowest = max(forecast.traffic, key=lambda each: each.seconds)
    if slowest.latency > slowest.seconds / 2:
        return f"the latency of {slowest.calls:,} collectives ({slowest.purpose})"
    intra = slowest.intra / (cluster.intra or cluster.rates.intra)
    inter = slowest.inter / cluster.inter
    link = "between machines" if inter > intra else "within machines"
    return f"the network {link} ({slowest.purpose})"


def advice_of(forecast: "Forecast") -> list[str]:
    """What to change, most useful first; empty when nothing is worth it."""
    return [*_on_memory(forecast), *_on_owners(forecast), *_on_time(forecast)]


def _on_memory(forecast: "Forecast") -> Iterator[str]:
    if forecast.cluster is None:
        return
    has, needs = forecast.cluster.rates.memory, forecast.memory.total
    if needs <= _MOST_USED * has:
        return
    memory = forecast.memory
    shown = f"the fullest rank needs {needs / 1e9:.0f} of {has / 1e9:.0f} GB"
    way_out = "shard over more ranks (mesh.shard)"
    if memory.activations > needs / 2 and not forecast.workload.checkpointing:
        way_out = "checkpoint activations, or use a smaller micro-batch"
    elif memory.activations > needs / 2:
        way_out = "use a smaller micro-batch"
    elif not forecast.conduct.reshard_after_forward:
        way_out = "reshard after the forward"
    yield f"{shown}: {way_out}"


def _on_owners(forecast: "Forecast") -> Iterator[str]:
    total, num_ranks = sum(forecast.newton_schulz), forecast.mesh.size
    steps = forecast.workload.ns_steps
    costliest = max(forecast.owners.matrices, key=lambda matrix: operations(matrix, steps))
    cost = operations(costliest, steps)
    useful = -(-total // cost)
    idle = sum(1 for flops in forecast.newton_schulz if not flops)
    if idle:
        yield (
            f"{idle:,} of {num_ranks:,} ranks own no matrix: there are "
            f"{len(forecast.owners.matrices):,}, and about {useful:,} owners finish no later; more "
            "ranks help forward and backward alone"
        )
    elif forecast.imbalance > _BALANCED and cost * num_ranks > _BALANCED * total:
        yield (
            f"{costliest.name} alone is {cost * num_ranks / total:.1f} x the mean Newton-Schulz "
            f"work of a rank{_division(costliest)}"
        )


def _division(matrix: Matrix) -> str:
    if matrix.num_matrices > 1:
        return f"; its {matrix.num_matrices} matrices could have an owner each as parameters"
    return "; if it is several projections side by side, say so (splits), or use fewer ranks"


def _on_time(forecast: "Forecast") -> Iterator[str]:
    time, cluster = forecast.time, forecast.cluster
    if time is None or cluster is None:
        return
    best = min(_others(forecast), key=_seconds, default=None)
    if best is not None and _seconds(best) < (1 - _WORTH_IT) * time.total:
        yield (
            f"mesh {best.mesh} (replicate x shard) would take {_seconds(best):.3g} s a step "
            f"instead of {time.total:.3g}"
        )
    if time.exposed > _WORTH_IT * time.total:
        factor = time.communication / time.compute
        yield (
            f"communication lasts {factor:.1f} x as long as forward and backward: with "
            f"{factor:.1f} x the tokens a rank and step it would be hidden"
        )
    if time.newton_schulz > 0.1 * time.total:
        share = time.newton_schulz / time.total
        yield (
            f"Newton-Schulz of the busiest owner is {share:.0%} of a step: a larger batch, or more "
            "ranks if each can still have its share, makes it less"
        )


def _others(forecast: "Forecast") -> Iterator["Forecast"]:
    """Meshes of as many ranks whose replicas fill whole machines, and that fit into memory."""
    cluster, size = forecast.cluster, forecast.mesh.size
    assert cluster is not None
    shards = cluster.gpus_per_node
    while shards <= size:
        mesh = MeshShape(size // shards, shards)
        if size % shards == 0 and mesh != forecast.mesh:
            other = forecast.on(mesh)
            if other.memory.total <= _MOST_USED * cluster.rates.memory:
                yield other
        shards *= 2


def _seconds(forecast: "Forecast") -> float:
    assert forecast.time is not None
    return forecast.time.total
