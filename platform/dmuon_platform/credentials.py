"""User names and passwords in URIs, which belong in no file of a run and on no terminal."""

import os
import re
from base64 import b64encode
from urllib.parse import unquote

_DATABASE = re.compile(r"(\b[\w+]*sql[\w+]*://)[^:/\s]*(?::[^@\s]*)?@")  # as SQLAlchemy reads one
_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_PARAMETER = re.compile(r"([?&]\w*(?:password|secret|token)\w*=)[^&\s'\")]*", re.IGNORECASE)

_VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own, which all processes of a launch inherit."""


def without_credentials(text: str) -> str:
    """Return a URI, or text in which some are, without what only their servers should know."""
    return _PARAMETER.sub(r"\1***", _USER.sub("", _DATABASE.sub(r"\1", text)))


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
    given = _USER.search(uri)
    named, _, secret = given[0][:-1].partition(":") if given else ("", "", "")
    user = unquote(named) or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(secret) or os.environ.get("MLFLOW_TRACKING_PASSWORD")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user and password:
        return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}
    return {"Authorization": f"Bearer {token}"} if token else {}
