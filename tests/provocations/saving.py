"""Mistakes when a checkpoint is saved or loaded; each is given a `Ready`."""

from provocations.form import Provocation

import dmuon
from dmuon import CheckpointError, SetupError

ROWS = [
    # saving
    Provocation(
        lambda ready: ready.save(3),
        SetupError,
        "got 3",
        "the path of a checkpoint must be text or a pathlib.Path",
    ),
    Provocation(lambda ready: ready.save(""), SetupError, "got ''", "and not empty"),
    Provocation(
        lambda ready: ready.save("s3://bucket/x"),
        CheckpointError,
        "s3:/bucket/x: it cannot be written: it is a URL",
        "in folders alone",
        "dmuon checkpoint copy SOURCE TARGET",
    ),
    Provocation(
        lambda ready: ready.save(ready.folder / "file"),
        CheckpointError,
        "file: it cannot be written: there is a file",
        "give the path of a new folder",
    ),
    Provocation(
        lambda ready: ready.save(extra=3),
        CheckpointError,
        "extra",
        "must be a dictionary by text",
        "got 3",
    ),
    Provocation(
        lambda ready: ready.save(files={"manifest.json": b""}),
        CheckpointError,
        "the file manifest.json of yours",
        "has the name of one of its own",
        "rename it",
    ),
    Provocation(
        lambda ready: ready.save(step=-1), CheckpointError, "got -1", "step must be a whole number"
    ),
    Provocation(
        lambda ready: ready.save(timeout=3),
        CheckpointError,
        "got 3",
        "a positive datetime.timedelta",
    ),
    # loading
    Provocation(
        lambda ready: dmuon.load_checkpoint(ready.folder / "none", ready.model),
        CheckpointError,
        "none: there is no such file or folder",
        "give a checkpoint, or a file of weights",
    ),
    Provocation(
        lambda ready: dmuon.load_checkpoint(ready.folder, ready.model),
        CheckpointError,
        "it has no weights: none of manifest.json",
        "give the folder they are in",
    ),
]
