"""Section ``export``: what becomes of the trained model."""

from pydantic import Field

from dmuon_platform.spec.section import Section


class ExportSpec(Section):
    """A Hugging Face folder at the end, registered in MLflow."""

    enabled: bool = True
    """Whether the model is exported and registered after the last step."""

    registered_model: str | None = Field(None, min_length=1)
    """Name in the MLflow model registry; none for the name of the job."""

    alias: str = Field("latest", min_length=1)
    """Alias that the new version gets; MLflow has "latest" for the newest one by itself."""
