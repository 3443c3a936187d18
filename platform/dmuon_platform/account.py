"""Whose process this is."""

import getpass


def user_name() -> str | None:
    """Return the name of the user; None where there is only a number, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
