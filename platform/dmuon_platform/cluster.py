"""A Ray cluster for one job: our own, started and stopped here, or one that is already there."""

import importlib.util
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmuon_platform.elastic import NodeRoom
from dmuon_platform.errors import NoCluster, PlatformError, SpecError
from dmuon_platform.spec import JobSpec
from dmuon_platform.spec.resources import AUTO, HEAD

CONNECT_TIMEOUT_S = 5.0
"""How long an address given in the job may take to accept a connection."""

NODE_TIMEOUT_S = 2.0
"""How long a machine may take to accept a connection."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Ray's default is 30 % of the memory; only data preparation passes objects here."""

MAX_TEMP_ROOT = 40
"""Ray puts sockets some 60 characters below its folder, and Linux allows 107 in all."""

BROUGHT = {"site-packages", "dist-packages", "py_modules_files"}
"""Folders of packages that workers have already: installed, or sent with ``ray job submit``."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a job mean what they say
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # or workers print everything twice
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # also the cadence of ray.train.report
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # `driving` watches for machines that leave
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    # Idle workers at the start, which no actor of Ray Train can use: those have an environment.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",  # else everything else on the machine goes before the training
}
"""How fast Ray notices things. What a job computes does not depend on any of it."""


def prepare_environment() -> None:
    """Set what Ray reads when it is imported; what the operator has set stays."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_address(spec: JobSpec) -> None:
    """Refuse an address that nobody listens on, before Ray waits a minute for it.

    Raises:
        SpecError: Ray is told to join a cluster by Ray Client.
        NoCluster: Nothing answers there.
    """
    name, address = "resources.address", address_of(spec)
    if address == AUTO:
        name, address = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS", "")
    if address is not None and address.startswith("ray://"):
        raise SpecError(
            f"{name} = {address!r} is Ray Client, which cannot start a training: set it to "
            "'host:port' of the head (port 6379 unless changed), or launch the job inside the "
            "cluster with `dmuon submit`."
        )
    if address is None or not HEAD.fullmatch(address):
        return
    try:
        reach_head(address)
    except OSError as error:
        raise NoCluster(
            f"No Ray cluster answers at {name} = {address!r} ({error.strerror or error}). Start "
            "one with `ray start --head --port=6379`, correct the address, or leave it out: then "
            "the job starts a local Ray of its own."
        ) from error


def reach_head(address: str) -> None:
    """Connect to ``host:port`` for a moment.

    Raises:
        OSError: Nothing answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except UnicodeError as error:  # part of the name is empty or above 63 characters
        raise OSError(f"no machine has such an address: {error}") from error


def address_of(spec: JobSpec) -> str | None:
    """Return which cluster the job uses; inside ``ray job submit`` the job's. None: its own."""
    return spec.resources.address or (AUTO if os.environ.get("RAY_ADDRESS") else None)


def scratch_folder() -> Path:
    """Make a folder for a Ray of our own, with a short name."""
    root = tempfile.gettempdir()
    short = root if len(root) <= MAX_TEMP_ROOT else "/tmp"
    return Path(tempfile.mkdtemp(prefix="dmuon-", dir=short))


@contextmanager
def connected(spec: JobSpec, scratch: Path) -> Iterator[str]:
    """Be connected to the job's cluster; yield the address of its head.

    Args:
        spec: The job.
        scratch: An empty folder, for a Ray of our own.

    Raises:
        PlatformError: The cluster does not accept us.
    """
    prepare_environment()
    address = address_of(spec)
    with _joined(address) if address else _local(spec, scratch):
        import ray

        yield ray.get_runtime_context().gcs_address


@contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env=_source_environment(),
        )
    except (ConnectionError, RuntimeError) as error:
        raise NoCluster(
            f"Cannot join the Ray cluster at {address!r}: {error}\nIf it uses token "
            "authentication, set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on its head; 'auto' needs a "
            "cluster running on this machine."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _local(spec: JobSpec, scratch: Path) -> Iterator[None]:
    _choose_authentication()
    import ray

    _, most = spec.resources.bounds
    try:
        ray.init(
            address="local",
            # Workers may outnumber the cores here, which is slow and not wrong; one CPU more
            # lets data be prepared when the workers take all.
            num_cpus=max(os.cpu_count() or 1, most * spec.resources.cpus_per_worker + 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(scratch),
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield
    finally:
        ray.shutdown()


def _choose_authentication() -> None:
    if "ray" in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # what ray took at its import
        return
    # A fresh token: other users of this machine cannot run code in our cluster.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _source_environment() -> dict[str, Any]:
    """What workers on other machines need to import us when we run from a source folder."""
    folders = [_folder_of(name) for name in ("dmuon", "dmuon_platform")]
    modules = [str(folder) for folder in folders if not BROUGHT & set(folder.parts)]
    return {"py_modules": modules} if modules else {}  # an empty list would clash with a job's own


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise PlatformError(f"The package {package} cannot be found; install it beside this one.")
    return Path(spec.origin).parent


def free_room() -> list[NodeRoom]:
    """Return what is free on each machine that is there; one that does not answer is not."""
    import ray
    from ray._private import state  # no public call tells it machine by machine

    leaving = state.state.get_draining_nodes()
    free = state.available_resources_per_node()
    rooms = []
    for node in ray.nodes():
        if not node["Alive"] or not _answers(node):
            continue  # Ray takes some 15 s to find out
        there = free.get(node["NodeID"], {})
        whole = node["Resources"]
        rooms.append(
            NodeRoom(
                cpus=there.get("CPU", 0.0),
                gpus=there.get("GPU", 0.0),
                all_cpus=whole.get("CPU", 0.0),
                all_gpus=whole.get("GPU", 0.0),
                is_leaving=node["NodeID"] in leaving,
            )
        )
    return rooms


def ask_for_room(spec: JobSpec, num_workers: int) -> None:
    """Ask the cluster's autoscaler for machines for so many workers in all; 0 takes that back.

    Ray keeps one such request for the whole cluster, the newest. Without an autoscaler nobody
    reads it.
    """
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[spec.resources.of_one_worker] * num_workers)


def _answers(node: dict[str, Any]) -> bool:
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=NODE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
