"""What a sweep runs: grids of settings, times seeds, as jobs of one process each."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dmuon_platform.errors import SpecError
from dmuon_platform.spec import JobSpec, load_job

ALONE = (
    # The result does not depend on the number of workers, so one is enough for each.
    "resources.workers=1",
    "resources.address=none",
    "mesh.replicate=1",
    "mesh.shard=none",
    "export.enabled=false",
    "tracking.update_statistics_every=none",
    "faults.inject=[]",
)

OWN = ("train.seed", "name", "storage", *(each.partition("=")[0] for each in ALONE))
"""Keys that the sweep sets, alike for all points but for seed and name."""

_MOST_CHARACTERS = 100
"""Of the name of a run."""

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Grid:
    """Values to try, by key of a job; every combination is run.

    Attributes:
        axes: Values as text, by key, in the order in which they were given.
    """

    axes: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, assignments: Sequence[str]) -> "Grid":
        """Read ``key=value,value,...`` of each key.

        Raises:
            SpecError: What is no such assignment, or a value that is there twice.
        """
        axes: dict[str, tuple[str, ...]] = {}
        for assignment in assignments:
            key, equals, text = (part.strip() for part in assignment.partition("="))
            values = tuple(_split(text))
            if not equals or not key or not all(values):
                raise SpecError(
                    f"--grid {assignment}: must be section.key=VALUE,VALUE,...; write for example "
                    "--grid optimizer.lr=0.01,0.02,0.04"
                )
            if key in axes or len(set(values)) < len(values):
                raise SpecError(f"--grid {assignment}: a key or a value is there twice; once is it")
            for own in OWN:
                if f"{own}.".startswith(f"{key}.") or f"{key}.".startswith(f"{own}."):
                    raise SpecError(f"--grid {assignment}: {own} is the sweep's; seeds are --seeds")
            axes[key] = values
        return cls(axes)

    @property
    def varied(self) -> list[str]:
        """The keys with more than one value."""
        return [key for key, values in self.axes.items() if len(values) > 1]

    @property
    def label(self) -> str:
        """What all its points share, in a few words."""
        fixed = [
            f"{last_part(key)} {values[0]}" for key, values in self.axes.items() if not values[1:]
        ]
        return ", ".join(fixed) or ", ".join(map(last_part, self.axes))

    def settings(self) -> Iterator[Settings]:
        """Yield every combination."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))


@dataclass(frozen=True)
class Point:
    """One training of a sweep.

    Attributes:
        grid: Number of its grid.
        settings: What it changes in the job.
        seed: Its ``train.seed``.
        spec: Its job.
    """

    grid: int
    settings: Settings
    seed: int
    spec: JobSpec


def make_points(
    job: Path, overrides: Sequence[str], grids: Sequence[Grid], seeds: Sequence[int], storage: Path
) -> list[Point]:
    """Return all points, checked, in the order in which they are to be run: seed by seed.

    Raises:
        SpecError: A value that the job does not take, or two points that are one.
    """
    points: list[Point] = []
    for seed in seeds:
        for number, grid in enumerate(grids):
            for settings in grid.settings():
                changes = [f"{key}={value}" for key, value in settings.items()]
                own = [f"train.seed={seed}", f"name={_name(settings, seed)}", f"storage={storage}"]
                spec = load_job(job, [*overrides, *ALONE, *changes, *own])
                points.append(Point(number, settings, seed, spec))
    first: dict[str, Point] = {}
    for point in points:
        same = first.setdefault(point.spec.model_copy(update={"name": "any"}).digest(), point)
        if same is not point:
            raise SpecError(
                f"the grids have {_words(point)} twice: {_words(same)} trains the same; take one "
                "of them out"
            )
    return points


def _words(point: Point) -> str:
    return " ".join(f"{key}={value}" for key, value in point.settings.items())


def _name(settings: Settings, seed: int) -> str:
    parts = [f"{last_part(key)}-{value}" for key, value in settings.items()]
    text = "-".join([*parts, f"seed-{seed}"])
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text)
    if name != text or len(name) > _MOST_CHARACTERS:  # others may come out alike
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        ending = f"-{digest}-seed-{seed}"
        name = name[: _MOST_CHARACTERS - len(ending)] + ending
    return name.lstrip("._-")


def last_part(key: str) -> str:
    """Return what a key is called in its section."""
    return key.rpartition(".")[2]


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas, but for commas in brackets."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()
