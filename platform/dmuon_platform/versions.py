"""Which versions a run depends on most."""

import platform
from importlib.metadata import version

import dmuon

DECISIVE = ("torch", "ray", "mlflow")


def versions_text() -> str:
    """Return our version and, in brackets, those of Python and of the packages below us."""
    packages = ", ".join(f"{name} {version(name)}" for name in DECISIVE)
    return f"dmuon {dmuon.__version__} (Python {platform.python_version()}, {packages})"
