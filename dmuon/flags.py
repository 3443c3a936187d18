"""Arguments that are True or False, and nothing else."""

from dmuon.errors import SetupError


def check_flags(**flags: object) -> None:
    """Refuse what is no bool: of text, also "no" would count as true.

    Raises:
        SetupError: naming the first.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise SetupError(f"{name} is either True or False, got {value!r:.100}")
