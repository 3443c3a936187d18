"""What a training reaches over the network: a Ray cluster, and MLflow."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path

from dmuon_platform.cluster import reach_head
from dmuon_platform.credentials import login_of, ray_login_of
from dmuon_platform.finding import Finding, State
from dmuon_platform.spec.resources import HEAD
from dmuon_platform.spec.uri import CLEARLY, UNCLEAR, is_unclear, without_credentials

TIMEOUT_S = 5.0
_SCHEMES = {"file", "sqlite", "postgresql", "mysql", "mssql", "databricks"}
"""Of MLflow's own tracking stores; a package may add others."""


def check_ray(address: str | None) -> Iterator[Finding]:
    """Yield whether a cluster answers and takes us; without an address a job has its own Ray."""
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    if address is None:
        yield Finding("Ray", State.GOOD, "a job starts one of its own, with a token of its own")
    elif is_unclear(address):
        yield Finding("Ray", State.BROKEN, f"the address given {UNCLEAR}", CLEARLY)
    elif address.startswith(("http://", "https://")):
        yield _job_server(address.rstrip("/"), mode)
    else:
        yield _head(address, mode)


def _head(address: str, mode: str) -> Finding:
    if not HEAD.fullmatch(address):
        seen = f"{without_credentials(address)!r} is no address"
        fix = "give host:port of the head (6379), or http://host:8265 of its job server"
        return Finding("Ray", State.BROKEN, seen, fix)
    try:
        reach_head(address)
    except OSError as error:
        port = address.rpartition(":")[2]
        fix = f"start it with `ray start --head --port={port}`, or open the port between machines"
        return Finding("Ray", State.BROKEN, f"nothing answers at {address} ({_why(error)})", fix)
    return Finding("Ray", State.GOOD, f"{address} answers; RAY_AUTH_MODE is {mode}")


def _job_server(address: str, mode: str) -> Finding:
    about = "Ray job server"
    login, address = ray_login_of(address), without_credentials(address)
    try:
        version = _version_at(address, login)
    except urllib.error.HTTPError as error:
        fix = "give the address of Ray's dashboard, port 8265 unless changed"
        if error.code in (401, 403):
            fix = f"set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the head; ours is {mode}"
        return Finding(about, State.BROKEN, f"{address} answers {error.code}", fix)
    except (OSError, ValueError, KeyError) as error:
        fix = "start it with `ray start --head` (it needs ray[default]), or correct the address"
        return Finding(about, State.BROKEN, f"none at {address} ({_why(error)})", fix)
    ours = metadata.version("ray")
    if version != ours:
        fix = f"install the same version on both sides: pip install 'ray=={version}'"
        return Finding(about, State.BROKEN, f"Ray {version} there, {ours} here", fix)
    return Finding(about, State.GOOD, f"Ray {version} at {address}; RAY_AUTH_MODE is {mode}")


def _version_at(address: str, login: dict[str, str]) -> str:
    request = urllib.request.Request(f"{address}/api/version", headers=login)
    with closing(urllib.request.urlopen(request, timeout=TIMEOUT_S)) as answer:
        return str(json.load(answer)["ray_version"])


def check_mlflow(uri: str | None, storage: Path) -> Finding:
    """Say whether MLflow can be told; a training runs in any case."""
    if uri is None:
        return Finding("MLflow", State.GOOD, f"a database in {storage}")
    if is_unclear(uri):
        return Finding("MLflow", State.BROKEN, f"the tracking URI {UNCLEAR}", CLEARLY)
    if not uri.startswith(("http://", "https://")):
        return _store(uri)
    return _tracking_server(uri)


def _tracking_server(uri: str) -> Finding:
    login, uri = login_of(uri), without_credentials(uri)
    request = urllib.request.Request(f"{uri.rstrip('/')}/version", headers=login)
    try:
        with closing(urllib.request.urlopen(request, timeout=TIMEOUT_S)) as answer:
            version = answer.read(100).decode("ascii", "replace")
    except urllib.error.HTTPError as error:
        fix = (
            "where it wants a user and a password, put MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD into the environment; a name of the server that it refuses "
            "belongs in its --allowed-hosts. Until then metrics wait on the disk"
        )
        told = f"{uri} answers {error.code} ({error.reason}), and no version of MLflow"
        return Finding("MLflow", State.POOR, told, fix)
    except (OSError, ValueError) as error:
        fix = "start it with `mlflow server`. Until then metrics wait on the disk"
        return Finding("MLflow", State.POOR, f"no server at {uri} ({_why(error)})", fix)
    return Finding("MLflow", State.GOOD, f"MLflow {version} at {uri}")


def _store(uri: str) -> Finding:
    scheme, ending, _ = uri.partition("://")
    if ending and scheme.partition("+")[0] not in _SCHEMES:
        fix = "give http://HOST:5000, sqlite:///FILE or postgresql://USER@HOST/NAME"
        uri = without_credentials(uri)
        return Finding("MLflow", State.POOR, f"{uri!r} is no tracking URI of MLflow's own", fix)
    return Finding("MLflow", State.GOOD, f"{scheme}, opened by the job")


def _why(error: Exception) -> str:
    """What the system says, without its number and without what wraps it."""
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason)
