"""User and password of a URI, which the environment keeps, and with which a server is asked."""

import os
from base64 import b64encode

from dmuon_platform.spec.uri import user_and_password, without_credentials

_VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own, which all processes of a launch inherit."""


def keep_aside(uri: str) -> str:
    """Return a tracking URI without its credentials, which the environment keeps."""
    bare = without_credentials(uri)
    if bare != uri:
        os.environ[_VARIABLE] = uri
    return bare


def with_credentials(uri: str) -> str:
    """Return a tracking URI as the environment has it, if that leads to the same place."""
    known = os.environ.get(_VARIABLE, "")
    return known if without_credentials(known) == uri else uri


def login_of(uri: str) -> dict[str, str]:
    """Return the header with which a tracking server is asked, as MLflow does; empty without one.

    User and password come from the URI or from MLflow's variables, the token from its variable.
    """
    user, password = user_and_password(uri)
    user = user or os.environ.get("MLFLOW_TRACKING_USERNAME", "")
    password = password or os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    return _header(user, password, os.environ.get("MLFLOW_TRACKING_TOKEN"))


def ray_login_of(address: str) -> dict[str, str]:
    """Return the header with which a job server is asked, as Ray does; empty without one."""
    return _header(*user_and_password(address), os.environ.get("RAY_AUTH_TOKEN"))


def _header(user: str, password: str, token: str | None) -> dict[str, str]:
    if user and password:
        return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}
    return {"Authorization": f"Bearer {token}"} if token else {}
