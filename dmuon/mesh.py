"""Reading the user's mesh: which ranks are replicas, which are shards, on what device."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon.errors import SetupError
from dmuon.owner_map import GridOwners, OwnerMap, ShardOwners

_WAY_OUT = (
    "use init_device_mesh(device, (num_ranks,)) or init_device_mesh(device, (R, S), "
    'mesh_dim_names=("replicate", "shard"))'
)


def check_mesh(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> None:
    """Refuse a mesh that cannot hold owners.

    Raises:
        SetupError: for anything but a 1D mesh, a named ``(replicate, shard)`` mesh, or a 1D
            ``mesh`` together with a 1D ``replicate_mesh``.
    """
    if not isinstance(mesh, DeviceMesh):
        raise SetupError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}; {_WAY_OUT}")
    if mesh.get_coordinate() is None:
        raise SetupError(
            f"rank {dist.get_rank()} is not part of {mesh}; call this on its ranks only"
        )
    if replicate_mesh is not None:
        _check_apart(mesh, replicate_mesh)
    elif mesh.ndim == 2:
        names = mesh.mesh_dim_names or ("", "")
        if "replicate" not in names[0] or "shard" not in names[1]:
            raise SetupError(
                f"the axes of a 2D mesh must be named (replicate, shard) in this order, "
                f"got {mesh.mesh_dim_names}; {_WAY_OUT}"
            )
    elif mesh.ndim != 1:
        raise SetupError(f"mesh must have 1 or 2 axes, got {mesh.ndim}; {_WAY_OUT}")
    _check_ascending(mesh)


def make_owner_map(
    mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, timeout: timedelta | None
) -> OwnerMap:
    """The kind of owner map this mesh asks for; the only place that chooses.

    Collective over the ranks of the mesh: makes the process groups and warms each one up.
    """
    owner_map: OwnerMap
    if replicate_mesh is not None:
        owner_map = GridOwners(_grid_of(mesh, replicate_mesh), timeout)
    elif mesh.ndim == 2:
        owner_map = GridOwners(mesh.mesh, timeout)
    else:
        owner_map = ShardOwners(mesh, timeout)
    for group in owner_map.groups():
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device_of(mesh)), group=group)
    return owner_map


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def default_timeout(mesh: DeviceMesh) -> timedelta | None:
    """The timeout of the mesh's own process group, so that a user sets it in one place."""
    backend = mesh.get_group(0)._get_backend(torch.device(mesh.device_type))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _check_ascending(mesh: DeviceMesh) -> None:
    flat = mesh.mesh.flatten().tolist()
    if flat != sorted(flat):
        raise SetupError(f"the ranks of the mesh must be in ascending order, got {flat}")


def _check_apart(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> None:
    if not isinstance(replicate_mesh, DeviceMesh):
        raise SetupError(
            f"replicate_mesh must be a DeviceMesh, got {type(replicate_mesh).__name__}; {_WAY_OUT}"
        )
    if mesh.ndim != 1 or replicate_mesh.ndim != 1:
        raise SetupError(
            f"with replicate_mesh both meshes must have one axis, got {mesh.ndim} and "
            f"{replicate_mesh.ndim}; or pass one 2D mesh"
        )
    _check_ascending(replicate_mesh)
    common = set(mesh.mesh.tolist()) & set(replicate_mesh.mesh.tolist())
    if common != {dist.get_rank()}:
        raise SetupError(
            f"mesh and replicate_mesh must meet in this rank alone, they share {sorted(common)}"
        )


def _grid_of(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> torch.Tensor:
    """The ``R x S`` grid of ranks whose row and column through this rank are given.

    Collective over both meshes.
    """
    rows: list[list[int] | None] = [None] * replicate_mesh.size()
    dist.all_gather_object(rows, mesh.mesh.tolist(), group=replicate_mesh.get_group())
    return torch.tensor(rows)
