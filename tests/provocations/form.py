"""A mistake of a user, and the words that its message must have."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

INTERNALS = re.compile(
    r"Traceback|NoneType'|has no attribute|<lambda>|KeyError|pydantic|\bobject at 0x|not supported "
    r"between|argument must be|invalid \w+ value|\[Errno|codec can't"
)
"""Words of Python, its libraries or the system, which say nothing to who made the mistake."""


@dataclass(frozen=True)
class Provocation:
    """What is done wrong, and what the message says.

    Attributes:
        mistake: given what the table's test prepares.
        kind: of the error.
        thing: what is wrong, with the value that was found.
        rule: what holds.
        way_out: what to do; the rule again, where that says it.
    """

    mistake: Callable[[Any], object]
    kind: type[Exception]
    thing: str
    rule: str
    way_out: str = ""

    def check(self, given: Any) -> None:
        """Make the mistake, and look at the message."""
        with pytest.raises(self.kind) as caught:
            self.mistake(given)
        check_words(str(caught.value), self.thing, self.rule, self.way_out)


def check_words(message: str, *words: str) -> None:
    """Every word is there, and nothing that only who wrote the code understands."""
    for each in words:
        assert each in message, f"{each!r} is not in:\n{message}"
    assert not INTERNALS.search(message), message


def with_file(
    name: str, content: str | bytes, use: Callable[[Path], object]
) -> Callable[[Path], Any]:
    """Something done with a file that has this content."""

    def mistake(folder: Path) -> object:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return use(path)

    return mistake
