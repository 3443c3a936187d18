"""Sizes of models by name, each with the batch that shows something of it; options override."""

from typing import Any

Options = dict[str, Any]


def _model(width: int, layers: int, heads: int, intermediate: int, **more: Any) -> Options:
    sizes = {"width": width, "layers": layers, "heads": heads, "intermediate": intermediate}
    return {**sizes, **more}


_ORIENT = {"vocabulary": 4096, "sequence": 128, "batch": 8, "threads": 1, "warmup": 2}
_ON_GPU = {"vocabulary": 32_768, "precision": "bfloat16", "sequence": 1024, "ranks": (1,)}

PRESETS: dict[str, Options] = {
    # the one that steps of other distributed Muons are known of, on CPUs
    "orient": _model(512, 4, 8, 2048, gated=False, **_ORIENT),
    "10m": _model(256, 12, 4, 704),
    "50m": _model(512, 16, 8, 1408),
    "200m": _model(1024, 16, 16, 2816),
    "125m": _model(768, 12, 12, 2048, **_ON_GPU),
    "350m": _model(1024, 24, 16, 2816, **_ON_GPU),
    "1b": _model(2048, 16, 16, 5632, **_ON_GPU),
    "3b": _model(3072, 26, 24, 8192, batch=8, **_ON_GPU),
}
