"""The bar of a run on a terminal: one line, of which a narrow terminal gets what matters most."""

from collections.abc import Callable, Mapping
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.text import Text

LEAST_BAR, MOST_BAR = 10, 40
"""Columns of the bar itself."""

GAP = "  "

IMPORTANCE = (
    *("step", "doing", "loss", "left", "speed"),
    *("bar", "checkpoint", "restarts", "name", "elapsed"),
)
"""The parts of the line. Those that do not fit are left out, from the last one on."""

PLACES = (
    *("name", "bar", "step", "doing", "loss", "speed"),
    *("checkpoint", "restarts", "left", "elapsed"),
)
"""The same, from left to right."""

STYLES = {"step": "progress.download", "elapsed": "progress.elapsed"}


class ProgressBar:
    """A line that is drawn again and again at the bottom of a terminal, until it is stopped.

    Args:
        name: Of the run.
        num_steps: Of the whole run.
        console: The terminal.
        clock: Seconds, for the time since this was made.
    """

    def __init__(
        self, name: str, num_steps: int, console: Console, clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._num_steps = num_steps
        self._clock = clock
        self._since = clock()
        self._step = 0
        self._facts: Mapping[str, str] = {}
        self._live = Live(self, console=console, refresh_per_second=10)

    def start(self) -> None:
        """Begin to draw."""
        self._live.start()

    def show(self, step: int, facts: Mapping[str, str]) -> None:
        """Say what to draw from now on.

        Args:
            step: Steps done.
            facts: Parts of the line beside those known here, each by its name in `IMPORTANCE`.
        """
        self._step, self._facts = step, facts

    def stop(self) -> None:
        """Draw it a last time, and leave it there."""
        self._live.stop()

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line that fits; called by rich, ten times a second."""
        parts, room = fitting(self._parts(), options.max_width)
        bar_width = min(MOST_BAR, LEAST_BAR + room)
        for number, name in enumerate(part for part in PLACES if part in parts):
            if number:
                yield Text(GAP, end="")
            if name == "bar":
                yield Bar(self._num_steps, self._step, width=bar_width)
            else:
                yield Text(parts[name], STYLES.get(name, ""), end="")

    def _parts(self) -> dict[str, str]:
        return {
            "name": self._name,
            "bar": " " * LEAST_BAR,
            "step": f"{self._step:>{len(str(self._num_steps))}}/{self._num_steps}",
            "elapsed": str(timedelta(seconds=int(self._clock() - self._since))),
            **self._facts,
        }


def fitting(parts: Mapping[str, str], width: int) -> tuple[dict[str, str], int]:
    """Return the most important parts, as far as they fit side by side, and the columns left."""
    found: dict[str, str] = {}
    room = width + len(GAP)
    for name in IMPORTANCE:
        if name in parts:
            room -= cell_len(parts[name]) + len(GAP)
            if room < 0:
                return found, room + cell_len(parts[name]) + len(GAP)
            found[name] = parts[name]
    return found, room
