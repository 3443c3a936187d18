"""Section ``tracking``: what MLflow is told, and where it is."""

import re
from typing import Literal

from pydantic import Field, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from dmuon_platform.spec.section import Section


class TrackingSpec(Section):
    """MLflow gets one run, over all attempts; training never waits for it."""

    uri: str | None = Field(None, min_length=1)
    """MLflow tracking URI; none for ``mlflow.db`` (SQLite) in ``storage``."""

    @field_validator("uri")
    @classmethod
    def _uri_has_a_scheme(cls, uri: str | None) -> str | None:
        if uri is not None and re.fullmatch(r"[^/]+:\d+(/.*)?", uri):
            raise PydanticCustomError(
                "scheme", "must begin with its scheme: write http://{uri}", {"uri": uri}
            )
        return uri

    experiment: str = Field("dmuon", min_length=1)
    """MLflow experiment of the run."""

    checkpoint_artifacts: Literal["manifest", "weights", "full"] = "manifest"
    """What of each checkpoint is copied to MLflow; its manifest and place always are."""

    log_every: PositiveInt = 1
    """Steps between two points of a curve in MLflow."""

    update_statistics_every: PositiveInt | None = 100
    """Steps between two looks at Muon's updates, beside the first and the last; none for never."""
