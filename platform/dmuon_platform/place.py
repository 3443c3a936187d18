"""Where this process stands among the workers, and what they agree on together."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dmuon_platform.errors import PlatformError
from dmuon_platform.spec import JobSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """One worker's rank, device and mesh.

    ``control`` is a gloo group for small facts in host memory: it never waits for the device, and
    never mixes with what the model sends.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup

    @classmethod
    def take(cls, spec: JobSpec) -> "Place":
        """Build the mesh of the job. Collective over all workers."""
        device = torch.device("cuda" if spec.resources.gpus_per_worker else "cpu")
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            # One fixed number: sums over another number of threads differ in the last bit.
            torch.set_num_threads(spec.resources.cpus_per_worker)
        replicate, shard = spec.resolve_mesh(dist.get_world_size())
        if replicate == 1:
            mesh = init_device_mesh(device.type, (shard,), mesh_dim_names=("shard",))
        else:
            shape, names = (replicate, shard), ("replicate", "shard")
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        timeout = datetime.timedelta(seconds=spec.faults.timeout_s)
        control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), device, mesh, control)

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh as plain data: ranks along each axis."""
        names = self.mesh.mesh_dim_names or ()
        return dict(zip(names, self.mesh.shape, strict=True))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks. Collective over ``control``."""
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, what: str, make: Callable[[], T]) -> T:
        """Run ``make`` on rank 0 and return its result everywhere. Collective over ``control``.

        Args:
            what: What rank 0 does, for the error the other ranks raise.
            make: Called on rank 0 alone; its result must be small and picklable.

        Raises:
            PlatformError: ``make`` failed. Rank 0 raises its own error: nobody waits for ever.
        """
        answer: list[object] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                answer = [make(), None]
            except Exception as error:  # handed to all ranks below, and raised here
                failure = error
                answer = [None, f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise PlatformError(f"Rank 0 failed to {what}: {answer[1]}")
        return answer[0]  # type: ignore[return-value]
