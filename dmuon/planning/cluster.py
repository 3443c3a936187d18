"""The machines that a plan is made for: what a GPU computes, and what joins them."""

import math
from dataclasses import dataclass, field
from typing import Literal

from dmuon.errors import SetupError

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, from its data sheet, without sparsity.

    Attributes:
        bfloat16: floating-point operations a second of matrix products.
        float32: the same, without tensor cores.
        memory_rate: bytes a second of its memory.
        memory: bytes.
        intra: bytes a second to others in its machine, one way.
    """

    bfloat16: float
    float32: float
    memory_rate: float
    memory: int
    intra: float


# NVIDIA A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 data sheets (dense rates; NVLink is given
# there for both ways together), AMD Instinct MI300X data sheet (seven links of 64 GB/s one way).
GPUS = {
    "a100": Gpu(312e12, 19.5e12, 2.039e12, 80 * 10**9, 300e9),
    "h100": Gpu(989e12, 67e12, 3.35e12, 80 * 10**9, 450e9),
    "h200": Gpu(989e12, 67e12, 4.8e12, 141 * 10**9, 450e9),
    "b200": Gpu(2250e12, 75e12, 8e12, 180 * 10**9, 900e9),
    "mi300x": Gpu(1307e12, 163e12, 5.3e12, 192 * 10**9, 448e9),
}


@dataclass(frozen=True)
class Cluster:
    """GPUs in machines, and how fast bytes travel between them.

    Attributes:
        gpu: one of `GPUS`.
        gpus_per_node: in one machine; ranks fill machines one after the other.
        intra: bytes a second and GPU within a machine, one way; None: that of the GPU.
        inter: bytes a second and GPU between machines, one way: 50e9 is a 400 Gbit/s adapter each.
        achieved: the part of the peak that forward and backward reach. Llama 3 reports 0.38 to 0.43
            on up to 16,384 H100 (arXiv 2407.21783, table 4).
        achieved_newton_schulz: the part that Newton-Schulz reaches; bfloat16 products of the
            batches of `dmuon.batching` ran at 0.34 to 0.65 of the peak of an H200.
        latency: seconds that one message takes to begin with.

    Raises:
        SetupError: for an unknown GPU, or a number out of range.
    """

    gpu: str
    gpus_per_node: int = 8
    intra: float | None = None
    inter: float = 50e9
    achieved: float = 0.4
    achieved_newton_schulz: float = 0.5
    latency: float = 5e-6
    rates: Gpu = field(init=False)

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise SetupError(f"there is no GPU {self.gpu!r}; choose one of {', '.join(GPUS)}")
        object.__setattr__(self, "rates", GPUS[self.gpu])
        if self.intra is None:
            object.__setattr__(self, "intra", self.rates.intra)
        self._check()

    def _check(self) -> None:
        if type(self.gpus_per_node) is not int or self.gpus_per_node < 1:
            raise SetupError(f"gpus_per_node must be 1 or more, got {self.gpus_per_node!r}")
        for name in ("intra", "inter"):
            if not 0 < getattr(self, name) < math.inf:
                raise SetupError(f"{name} is bytes a second, above 0; got {getattr(self, name)!r}")
        for name in ("achieved", "achieved_newton_schulz"):
            if not 0 < getattr(self, name) <= 1:
                raise SetupError(f"{name} is a part of the peak, 0 to 1; got {getattr(self, name)}")
        if not 0 <= self.latency < 1:
            raise SetupError(f"latency is in seconds, 0 to 1; got {self.latency!r}")


@dataclass(frozen=True)
class Line:
    """The ranks of one process group, as they lie in machines.

    Attributes:
        size: number of ranks.
        num_nodes: machines that they lie in.
    """

    size: int
    num_nodes: int

    @property
    def ranks_per_node(self) -> float:
        """How many of them share a machine."""
        return self.size / self.num_nodes


def row_of(num_shards: int, gpus_per_node: int) -> Line:
    """One replica: consecutive ranks."""
    if gpus_per_node % num_shards == 0:
        return Line(num_shards, 1)
    return Line(num_shards, max(2, -(-num_shards // gpus_per_node)))


def column_of(num_replicas: int, num_shards: int, gpus_per_node: int) -> Line:
    """The same shard of every replica: every ``num_shards``-th rank."""
    rows_per_node = max(1, gpus_per_node // num_shards)
    return Line(num_replicas, -(-num_replicas // rows_per_node))
