"""Section ``mesh``: how the workers share the model."""

from collections.abc import Iterator

from pydantic import PositiveInt

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section


class MeshSpec(Section):
    """``replicate x shard`` is the number of workers; none for the one that follows from it."""

    replicate: PositiveInt | None = 1
    """Copies of the model (HSDP), each spread over ``shard`` workers; none to infer it."""

    shard: PositiveInt | None = None
    """Workers that share one copy of the model; none to infer it."""

    def problems(self) -> Iterator[Problem]:
        """Yield a mesh of which nothing is known."""
        if self.replicate is None and self.shard is None:
            yield Problem(
                "mesh.replicate",
                "only one of mesh.replicate and mesh.shard can be inferred",
                "write one of them, say mesh.replicate = 1",
                reads=("mesh.shard",),
            )

    def resolve(self, num_workers: int) -> tuple[int, int]:
        """Return ``(replicate, shard)`` for that many workers.

        Raises:
            SpecError: The mesh does not fit them.
        """
        problem = self.problem_with(num_workers)
        if problem is not None:
            raise problem.as_error()
        replicate = self.replicate or num_workers // (self.shard or num_workers)
        return replicate, self.shard or num_workers // replicate

    def problem_with(self, num_workers: int) -> Problem | None:
        """Return why the mesh does not fit that many workers, if it does not."""
        known = (self.replicate or 1) * (self.shard or 1)
        is_whole = self.replicate is not None and self.shard is not None
        if num_workers == known or (not is_whole and num_workers % known == 0):
            return None
        key = "mesh.replicate" if self.shard is None else "mesh.shard"
        if is_whole:
            rule = f"{self.replicate} x {self.shard} places do not fit {num_workers} workers"
            way_out = self._way_out(num_workers, known)
        else:
            fitting = ", ".join(str(n) for n in range(1, num_workers + 1) if num_workers % n == 0)
            rule = f"{known} does not divide {num_workers} workers"
            way_out = f"choose one of {fitting}, or another resources.workers"
        return Problem(key, rule, way_out, ("mesh.replicate", "mesh.shard", "resources.workers"))

    def _way_out(self, num_workers: int, known: int) -> str:
        for key, kept in (("mesh.replicate", self.shard), ("mesh.shard", self.replicate)):
            if kept is not None and num_workers % kept == 0:
                other = num_workers // kept
                sizes = (other, kept) if key == "mesh.replicate" else (kept, other)
                mesh = " x ".join(map(str, sizes))
                return f"set {key} = none, for {mesh}, or resources.workers = {known}"
        return f"set resources.workers = {known}, or leave one of the two out ('none')"
