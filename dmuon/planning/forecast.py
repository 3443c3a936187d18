"""``dmuon.plan``: what a step of a model on a mesh costs, before any rank is there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon.boundaries import Boundary
from dmuon.flags import check_flags
from dmuon.packing import Packing, check_packing
from dmuon.partition import Plan, make_plan
from dmuon.planning.advice import advice_of, limit_of
from dmuon.planning.cluster import Cluster
from dmuon.planning.collector import collector_paused
from dmuon.planning.conduct import Conduct, MeshShape, Transport, itemsizes, read_mesh
from dmuon.planning.memory import Memory, memories
from dmuon.planning.shape import ModelShape, read_shape
from dmuon.planning.slots import slots_of
from dmuon.planning.step_time import StepTime, Work, newton_schulz_per_owner, step_time
from dmuon.planning.traffic import Traffic, traffic_of
from dmuon.planning.workload import Workload
from dmuon.selection import Predicate, Splits, is_hidden_matrix


@dataclass(frozen=True)
class Spread:
    """An amount over all ranks."""

    least: float
    mean: float
    most: float


def _spread(amounts: Sequence[float]) -> Spread:
    return Spread(min(amounts), fmean(amounts), max(amounts))


@dataclass(frozen=True)
class Forecast:
    """What `plan` works out. ``to_dict`` makes plain data of it.

    Attributes:
        owners: the owner of every matrix, the one that ``dedicate_params`` would choose.
        shape: of the model.
        conduct: of the training.
        workload: of a rank.
        cluster: None: no times.
        newton_schulz: operations of every owner in a step.
        traffic: of the rank that communicates most.
        adamw_traffic: of a rank when FSDP2 shards everything, for AdamW.
        memory: of the owner of most bytes.
        least_memory: of the owner of fewest.
        adamw_memory: of a rank when FSDP2 shards everything.
        time: of a step.
        adamw_time: of a step of AdamW under FSDP2.
    """

    owners: Plan = field(repr=False)
    shape: ModelShape = field(repr=False)
    conduct: Conduct
    workload: Workload
    cluster: Cluster | None
    newton_schulz: tuple[int, ...] = field(repr=False)
    traffic: tuple[Traffic, ...]
    adamw_traffic: tuple[Traffic, ...]
    memory: Memory
    least_memory: Memory
    adamw_memory: Memory
    time: StepTime | None
    adamw_time: StepTime | None

    @property
    def mesh(self) -> MeshShape:
        """Replicas and shards."""
        return self.conduct.mesh

    @property
    def matrices_per_rank(self) -> Spread:
        """Matrices that ranks orthogonalise in a step."""
        return _spread(self.owners.num_matrices_per_owner)

    @property
    def flops_per_rank(self) -> Spread:
        """Operations of Newton-Schulz of ranks in a step."""
        return _spread(self.newton_schulz)

    @property
    def imbalance(self) -> float:
        """Operations of the busiest owner over the mean; 1.0 is perfect."""
        return max(self.newton_schulz) * self.mesh.size / sum(self.newton_schulz)

    @property
    def flops(self) -> float:
        """Operations of forward and backward of one rank in a step."""
        return self.workload.flops(self.shape.flops_per_token)

    @property
    def newton_schulz_share(self) -> float:
        """The part of all operations of a step that Newton-Schulz is, over all ranks."""
        total = sum(self.newton_schulz)
        return total / (total + self.flops * self.mesh.size)

    @property
    def num_whole_blocks(self) -> int:
        """How many blocks travel as a whole, and not owner by owner; see `dmuon.packing`."""
        owners = iter(self.owners.owners)
        found = (
            slots_of(block, [next(owners) for _ in block.matrices], self.conduct)
            for block in self.shape.blocks
        )
        return sum(1 for slots in found if slots is not None)

    @property
    def overhead(self) -> float | None:
        """The time of a step over that of AdamW, less one; None without a cluster."""
        if self.time is None or self.adamw_time is None:
            return None
        return self.time.total / self.adamw_time.total - 1

    @property
    def limit(self) -> str | None:
        """What a step waits for most; None without a cluster."""
        return limit_of(self)

    @property
    def advice(self) -> list[str]:
        """What to change, most useful first; empty when nothing is worth it."""
        return advice_of(self)

    def memory_of(self, rank: int) -> Memory:
        """What a rank of the mesh holds; they are numbered replica by replica."""
        activations = self.workload.activation_bytes(self.conduct.weight_itemsize)
        return memories(self.shape, self.owners, self.conduct, activations, (rank,))[0]

    def traffic_of(self, rank: int) -> tuple[Traffic, ...]:
        """What a rank of the mesh communicates in a step."""
        column = rank % self.mesh.num_shards
        return traffic_of(self.shape, self.owners, self.conduct, self.cluster, column)

    def on(self, mesh: MeshShape) -> "Forecast":
        """The same for another mesh of as many ranks."""
        return _forecast(
            self.shape,
            self.owners,
            replace(self.conduct, mesh=mesh),
            self.workload,
            self.cluster,
            self.newton_schulz,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: bytes, seconds, floating-point operations."""
        traffic = {
            name: [asdict(each) for each in found]
            for name, found in (("traffic", self.traffic), ("adamw_traffic", self.adamw_traffic))
        }
        memory = {
            name: {**asdict(found), "total": found.total}
            for name, found in (
                ("memory", self.memory),
                ("least_memory", self.least_memory),
                ("adamw_memory", self.adamw_memory),
            )
        }
        time = {
            name: None if found is None else {**asdict(found), "total": found.total}
            for name, found in (("time", self.time), ("adamw_time", self.adamw_time))
        }
        plan = self.owners
        names = (matrix.name for matrix in plan.matrices)
        return {
            "mesh": {"replicate": self.mesh.num_replicas, "shard": self.mesh.num_shards},
            "parameters": self.shape.numel,
            "dedicated": sum(matrix.numel for matrix in plan.matrices),
            "matrices_per_rank": asdict(self.matrices_per_rank),
            "newton_schulz_flops_per_rank": asdict(self.flops_per_rank),
            "imbalance": self.imbalance,
            "flops_per_rank": self.flops,
            "newton_schulz_share": self.newton_schulz_share,
            "packing": self.conduct.packing,
            "whole_blocks": self.num_whole_blocks,
            **traffic,
            **memory,
            **time,
            "overhead": self.overhead,
            "limit": self.limit,
            "advice": self.advice,
            "cluster": None if self.cluster is None else asdict(self.cluster),
            "workload": asdict(self.workload),
            "owners": dict(zip(names, plan.owners, strict=True)),
        }


@collector_paused()
def plan(  # noqa: PLR0913 - the public signature
    model: nn.Module,
    mesh: int | tuple[int, int],
    workload: Workload,
    predicate: Predicate = is_hidden_matrix,
    *,
    cluster: Cluster | None = None,
    reshard_after_forward: bool = True,
    reshard_root: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
    hook_boundary_predicate: Boundary | None = None,
    splits: Splits | None = None,
    transport: Transport = "reduce",
    packing: Packing = "auto",
) -> Forecast:
    """Work out what a step will cost: owners, bytes by collective, memory, and time. Local.

    Needs no ranks and no process group, and leaves the model as it is. Owners are those that
    ``dedicate_params`` chooses. Bytes and memory (but for activations) are those of a step with
    ``fully_shard`` on the same modules and on the root; all parameters are taken to be trained.

    Args:
        model: before ``dedicate_params``; may be on the meta device.
        mesh: number of ranks, or ``(replicate, shard)``.
        workload: of one rank.
        predicate: as of ``dedicate_params``, like those of the next that have the same name.
        cluster: for times and for what stays within a machine.
        reshard_after_forward: of blocks.
        reshard_root: of the root: whether ``fully_shard(model, reshard_after_forward=True)`` will
            be called; by default FSDP2 keeps it whole.
        mp_policy: as for ``dedicate_params`` and ``fully_shard``.
        hook_boundary_predicate: which modules will be given to ``fully_shard``; by default the
            members of module lists.
        splits: as of ``dedicate_params``.
        transport: of gradients: "reduce" as with NCCL, or "all_to_all" as with gloo.
        packing: as of ``dedicate_params``.

    Raises:
        SetupError: for arguments that ``dedicate_params`` would refuse, and parameters of several
            dtypes.
    """
    check_packing(packing)
    check_flags(reshard_after_forward=reshard_after_forward, reshard_root=reshard_root)
    shape = read_shape(model, predicate, splits, hook_boundary_predicate)
    mesh_shape = read_mesh(mesh)
    weight, grad = itemsizes(shape.itemsize, mp_policy)
    conduct = Conduct(
        mesh=mesh_shape,
        weight_itemsize=weight,
        reduce_itemsize=grad,
        reshard_after_forward=reshard_after_forward,
        reshard_root=reshard_root,
        transport=transport,
        packing=packing,
        num_micro_batches=workload.num_micro_batches,
    )
    owners = make_plan(shape.matrices, mesh_shape.size)
    newton_schulz = tuple(newton_schulz_per_owner(owners, workload.ns_steps))
    return _forecast(shape, owners, conduct, workload, cluster, newton_schulz)


def _forecast(
    shape: ModelShape,
    owners: Plan,
    conduct: Conduct,
    workload: Workload,
    cluster: Cluster | None,
    newton_schulz: tuple[int, ...],
) -> Forecast:
    held = owners.bytes_per_owner
    fullest, lightest = held.index(max(held)), held.index(min(held))
    activations = workload.activation_bytes(conduct.weight_itemsize)
    sharded = shape.without_owners()
    nobody = Plan((), (), conduct.mesh.size)
    traffic = traffic_of(shape, owners, conduct, cluster, _busiest_column(owners, conduct))
    adamw_traffic = traffic_of(sharded, nobody, conduct, cluster, 0)
    memory, least_memory = memories(shape, owners, conduct, activations, (fullest, lightest))
    (adamw_memory,) = memories(sharded, nobody, conduct, activations, (0,))
    time = adamw_time = None
    if cluster is not None:
        work = Work(
            flops=workload.flops(shape.flops_per_token),
            newton_schulz=max(newton_schulz),
            owned=max(held) // 8,
            shards=sum(p.first_shard(conduct.mesh.num_shards) for p in shape.symmetric),
            is_16_bit=conduct.weight_itemsize == 2,
            is_16_bit_newton_schulz=workload.ns_itemsize == 2,
        )
        time = step_time(work, traffic, cluster)
        shards = sum(p.first_shard(conduct.mesh.num_shards) for p in sharded.symmetric)
        adamw = replace(work, newton_schulz=0, owned=0, shards=shards)
        adamw_time = step_time(adamw, adamw_traffic, cluster)
    return Forecast(
        owners=owners,
        shape=shape,
        conduct=conduct,
        workload=workload,
        cluster=cluster,
        newton_schulz=newton_schulz,
        traffic=traffic,
        adamw_traffic=adamw_traffic,
        memory=memory,
        least_memory=least_memory,
        adamw_memory=adamw_memory,
        time=time,
        adamw_time=adamw_time,
    )


def _busiest_column(owners: Plan, conduct: Conduct) -> int:
    """The place in a replica whose owners hold most, which sends most to other replicas."""
    S = conduct.mesh.num_shards
    held = [0] * S
    for owner, size in enumerate(owners.bytes_per_owner):
        held[owner % S] += size
    return held.index(max(held))
