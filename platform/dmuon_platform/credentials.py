"""User names and passwords in URIs, which belong in no journal and on no terminal."""

import re

_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_PARAMETER = re.compile(r"([?&]\w*(?:password|secret|token)\w*=)[^&\s'\")]*", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """Return a URI, or text in which some are, without what only their servers should know."""
    return _PARAMETER.sub(r"\1***", _USER.sub("", text))
