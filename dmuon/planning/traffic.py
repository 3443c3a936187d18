"""Bytes of a step, collective by collective, and how long links are busy with them.

Costs are those of rings and pairwise exchanges (Thakur, Rabenseifner, Gropp 2005, "Optimization of
Collective Communication Operations in MPICH"). A collective over ``n`` ranks of a payload ``P``
makes each rank send ``P (n - 1) / n`` on average, an all-reduce twice that, and begins with
``log2(n)`` messages. One with a root lasts as long as ``P`` takes on one link, for it is a pipeline
through all ranks, and the next waits for it. Of a ring one hop in ``ranks_per_node`` leaves the
machine, of an exchange all that is meant for other machines.

What CallOrder compares and the norm of gradients, under a kilobyte, are left out.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dmuon.partition import Plan
from dmuon.planning.cluster import Cluster, Line, column_of, row_of
from dmuon.planning.conduct import Conduct
from dmuon.planning.shape import ModelShape
from dmuon.planning.slots import slots_of

_ROOTED = ("broadcast", "reduce", "publish")


@dataclass(frozen=True)
class Traffic:
    """What one rank does with one kind of collective in a step.

    Attributes:
        purpose: "unshard", "gradients", "publish" (dedicated parameters); "all-gather",
            "reduce-scatter", "all-reduce" (of FSDP2).
        kind: the collective; for dedicated parameters as `dmuon.Counters` calls it.
        axis: "shard" (the ranks of a replica) or "replicate" (replicas).
        calls: of the collective.
        payload: bytes handed to them, of the whole tensor on the larger side.
        intra: bytes that a rank sends within its machine, on average; 0 without a cluster.
        inter: bytes that it sends to other machines; without a cluster, all.
        seconds: that they take; 0 without a cluster.
        latency: the part of these that messages take to begin with.
    """

    purpose: str
    kind: str
    axis: str
    calls: int
    payload: int
    intra: float = 0.0
    inter: float = 0.0
    seconds: float = 0.0
    latency: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, on average."""
        return self.intra + self.inter


def traffic_of(
    shape: ModelShape, plan: Plan, conduct: Conduct, cluster: Cluster | None, column: int
) -> tuple[Traffic, ...]:
    """What a rank communicates in a step.

    Args:
        shape: of the model.
        plan: who owns its matrices.
        conduct: of the training.
        cluster: whose links are used; None: every rank is a machine, of unknown speed.
        column: the rank's place in its replica, on which payloads along ``replicate`` depend.
    """
    R, S = conduct.mesh.num_replicas, conduct.mesh.num_shards
    gpus_per_node = 1 if cluster is None else cluster.gpus_per_node
    lines = {"shard": row_of(S, gpus_per_node), "replicate": column_of(R, S, gpus_per_node)}
    found = (*_dedicated(shape, plan, conduct, column), *_symmetric(shape, conduct))
    return tuple(
        _on_links(each, lines[each.axis], cluster)
        for each in found
        if lines[each.axis].size > 1 and each.payload
    )


def _dedicated(shape: ModelShape, plan: Plan, conduct: Conduct, column: int) -> Iterator[Traffic]:
    """With each gradient travels a flag that says whether there is one."""
    S, rooted = conduct.mesh.num_shards, conduct.transport == "reduce"
    weight, grad = conduct.weight_itemsize, conduct.reduce_itemsize
    calls, numel = Counter[str](), Counter[str]()
    my_parcels = my_blocks = 0
    last = shape.last_with_matrices
    owners = iter(plan.owners)
    for index, block in enumerate(shape.blocks):
        owners_of_block = [next(owners) for _ in block.matrices]
        times = conduct.num_unshards_of_matrices(is_last=index == last)
        parcels = set(owners_of_block)
        slots = slots_of(block, owners_of_block, conduct)
        if slots is not None:
            calls.update(all_gather=times, reduce_scatter=1)
            numel["all_gather"] += times * slots.weights.numel
            numel["reduce_scatter"] += slots.gradients.numel
        else:
            calls["broadcast"] += times * len(parcels)
            calls[conduct.transport] += len(parcels) if rooted else bool(parcels)
            numel["broadcast"] += times * block.dedicated_numel
            numel[conduct.transport] += block.dedicated_numel + len(block.matrices)
        num_sourced = sum(1 for owner in parcels if owner % S == column)
        my_parcels += num_sourced
        my_blocks += bool(num_sourced)
    mine = [
        m.numel for m, owner in zip(plan.matrices, plan.owners, strict=True) if owner % S == column
    ]
    for kind in ("broadcast", "all_gather"):
        yield Traffic("unshard", kind, "shard", calls[kind], weight * numel[kind])
    for kind in (conduct.transport, "reduce_scatter"):
        yield Traffic("gradients", kind, "shard", calls[kind], grad * numel[kind])
    along_column = my_parcels if rooted else my_blocks
    payload = grad * (sum(mine) + len(mine))
    yield Traffic("gradients", conduct.transport, "replicate", along_column, payload)
    yield Traffic("publish", "publish", "replicate", my_parcels, weight * sum(mine))


def _symmetric(shape: ModelShape, conduct: Conduct) -> Iterator[Traffic]:
    S, grad = conduct.mesh.num_shards, conduct.reduce_itemsize
    sizes = [(conduct.num_unshards(block.name), block.padded(S)) for block in shape.blocks]
    sizes = [(times, numel) for times, numel in sizes if numel]
    gathers = sum(times for times, _ in sizes)
    gathered = sum(times * numel for times, numel in sizes) * conduct.weight_itemsize
    reduced = sum(numel for _, numel in sizes) * grad
    yield Traffic("all-gather", "all_gather", "shard", gathers, gathered)
    yield Traffic("reduce-scatter", "reduce_scatter", "shard", len(sizes), reduced)
    yield Traffic("all-reduce", "all_reduce", "replicate", len(sizes), reduced // S)


def _on_links(traffic: Traffic, line: Line, cluster: Cluster | None) -> Traffic:
    sent = traffic.payload * (line.size - 1) / line.size
    if traffic.kind == "all_reduce":
        sent *= 2
    inter = 0.0
    if line.num_nodes > 1 and traffic.kind == "all_to_all":
        inter = sent * (line.size - line.ranks_per_node) / (line.size - 1)
    elif line.num_nodes > 1:
        inter = sent / line.ranks_per_node
    seconds = latency = 0.0
    if cluster is not None and cluster.intra is not None:
        on_wire = max((sent - inter) / cluster.intra, inter / cluster.inter)
        if traffic.kind in _ROOTED:
            on_wire *= line.size / (line.size - 1)
        latency = traffic.calls * cluster.latency * math.log2(line.size)
        seconds = on_wire + latency
    return replace(traffic, intra=sent - inter, inter=inter, seconds=seconds, latency=latency)
