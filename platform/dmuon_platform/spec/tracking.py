"""Section ``tracking``: what MLflow is told, and where it is."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from dmuon_platform.spec.problem import Problem
from dmuon_platform.spec.section import Section
from dmuon_platform.spec.uri import CLEARLY, UNCLEAR, is_unclear

_NO_SCHEME = re.compile(r"[^/]+:\d+(/.*)?|(?!file:)[^/:]+:(?!//).*@.*")


class TrackingSpec(Section):
    """MLflow gets one run, over all attempts; training never waits for it."""

    uri: str | None = Field(None, min_length=1)
    """MLflow tracking URI; none for ``mlflow.db`` (SQLite) in ``storage``."""

    experiment: str = Field("dmuon", min_length=1)
    """MLflow experiment of the run."""

    checkpoint_artifacts: Literal["manifest", "weights", "full"] = "manifest"
    """What of each checkpoint is copied to MLflow; its manifest and place always are."""

    log_every: PositiveInt = 1
    """Steps between two points of a curve in MLflow."""

    update_statistics_every: PositiveInt | None = 100
    """Steps between two looks at Muon's updates, beside the first and the last; none for never."""

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the URI, of which only what is after a password is told."""
        if self.uri is None:
            return
        if _NO_SCHEME.fullmatch(self.uri):
            place = self.uri.rpartition("@")[2]
            yield Problem("tracking.uri", "must begin with its scheme", f"write http://{place}")
        elif is_unclear(self.uri):
            yield Problem("tracking.uri", UNCLEAR, CLEARLY)
