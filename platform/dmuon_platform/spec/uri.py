"""URIs as people write them: what in them is secret, and where nobody can tell."""

import re
from urllib.parse import unquote

_DATABASE = re.compile(r"(\b[\w+]*sql[\w+]*://)[^:/\s]*(?::[^@\s]*)?@")  # as SQLAlchemy reads one
_USER = re.compile(r"(?<=://)[^\s/?#\\]*@")
_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:passw|pwd|secret|token|api[_-]?key|odbc_connect)[\w.-]*=)[^&\s]*",
    re.IGNORECASE,
)
_UNCLEAR = re.compile(
    r"https?://(?:[^/?#\\]*[/?#\\].*@|.*\s)"
    r"|\b(?!sqlite)[\w+]*sql[\w+]*://(?:.*\s|[^@]*@[^/?]*/[^?]*@)",
    re.IGNORECASE | re.DOTALL,
)

UNCLEAR = (
    "has a blank, or an '@' after a '/', '?', '#' or backslash, so it cannot be told where a "
    "password in it ends"
)
"""What is wrong with a URI that `is_unclear`."""

CLEARLY = (
    "write %20 for a blank, and in user and password %2F for '/', %3F for '?', %23 for '#', "
    "%5C for a backslash, %40 for '@'; also %40 for an '@' behind the host"
)
"""And the way out."""


def without_credentials(text: str) -> str:
    """Return a URI, or text in which some are, without what only their servers should know."""
    return _PARAMETER.sub(r"\1***", _USER.sub("", _DATABASE.sub(r"\1", text)))


def is_unclear(uri: str) -> bool:
    """Tell whether `without_credentials` may leave a part of a password in this URI."""
    return _UNCLEAR.search(uri) is not None


def user_and_password(uri: str) -> tuple[str, str]:
    """Return what an HTTP server is told of who asks; empty where the URI does not say."""
    found = _USER.search(uri)
    user, _, password = found[0][:-1].partition(":") if found else ("", "", "")
    return unquote(user), unquote(password)
