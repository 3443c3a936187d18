"""Who writes what: a pure function of names, sizes and owners, equal on all ranks."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dmuon.errors import SetupError

Section = Literal["model", "optim"]
SECTIONS: tuple[Section, ...] = get_args(Section)
_ONLY_FILE = "model.safetensors"
"""The one name that is read without an index."""
_NUMBERED_FILE = re.compile(rf"(?:{'|'.join(SECTIONS)})-\d{{5,}}-of-\d{{5,}}\.safetensors")


@dataclass(frozen=True)
class Item:
    """One tensor to write.

    Attributes:
        name: as it will be in the file; once in its section.
        section: the weights of the model, or the state of the optimizer.
        num_bytes: of its values.
        owner: the writer that has it already and so writes it; None where any may.
    """

    name: str
    section: Section
    num_bytes: int
    owner: int | None = None


@dataclass(frozen=True)
class Assignment:
    """The writer and the file of every item.

    Attributes:
        writers: by section and name; in the order of section, then name.
        files: name of the file of a section that a writer writes; only where it has an item of it.
        num_bytes: of each writer, all sections together.
    """

    writers: Mapping[tuple[Section, str], int]
    files: Mapping[tuple[Section, int], str]
    num_bytes: tuple[int, ...]

    def writer(self, section: Section, name: str) -> int:
        """Who writes the item."""
        return self.writers[section, name]

    def file(self, section: Section, name: str) -> str:
        """The name of the file that the item will be in."""
        return self.files[section, self.writers[section, name]]

    def names_of(self, section: Section, writer: int) -> list[str]:
        """What ``writer`` writes of a section, sorted."""
        return [
            name for (its, name), who in self.writers.items() if its == section and who == writer
        ]


def assign(items: Sequence[Item], num_writers: int) -> Assignment:
    """Choose who writes what, so that all have about the same number of bytes to write.

    Items with an owner are written by it. The others go, the largest first, to the writer that has
    the fewest bytes so far (Graham 1969), whichever their section.

    Args:
        items: in any order.
        num_writers: their numbers are 0 to ``num_writers - 1``.

    Raises:
        SetupError: an item is there twice, or its owner is no writer.
    """
    _check(items, num_writers)
    loads = [0] * num_writers
    writers: dict[tuple[Section, str], int] = {}
    for item in sorted(items, key=_largest_first):
        if item.owner is None:
            writer = min(range(num_writers), key=loads.__getitem__)
        else:
            writer = item.owner
        loads[writer] += item.num_bytes
        writers[item.section, item.name] = writer
    ordered = dict(sorted(writers.items()))
    return Assignment(ordered, _name_files(ordered), tuple(loads))


def _largest_first(item: Item) -> tuple[bool, int, str, str]:
    return item.owner is None, -item.num_bytes, item.section, item.name


def _name_files(writers: Mapping[tuple[Section, str], int]) -> dict[tuple[Section, int], str]:
    """Number the files of a section without gaps, over the writers that have something of it."""
    busy: dict[Section, set[int]] = defaultdict(set)
    for (section, _), writer in writers.items():
        busy[section].add(writer)
    return {
        (section, writer): _file_name(section, number, len(busy[section]))
        for section in SECTIONS
        for number, writer in enumerate(sorted(busy[section]), start=1)
    }


def section_of(file: str) -> Section:
    """The section that a file holds, by its name."""
    return "optim" if file.startswith("optim-") else "model"


def is_tensor_file(name: str) -> bool:
    """Whether a file of a checkpoint with this name holds tensors."""
    return name == _ONLY_FILE or _NUMBERED_FILE.fullmatch(name) is not None


def _file_name(section: Section, number: int, count: int) -> str:
    if section == "model" and count == 1:
        return _ONLY_FILE
    return f"{section}-{number:05d}-of-{count:05d}.safetensors"


def _check(items: Sequence[Item], num_writers: int) -> None:
    if num_writers < 1:
        raise SetupError(f"num_writers={num_writers}: a checkpoint needs at least one writer")
    seen: set[tuple[Section, str]] = set()
    for item in items:
        if (item.section, item.name) in seen:
            raise SetupError(f"{item.name} is in section {item.section!r} twice; name each once")
        seen.add((item.section, item.name))
        if item.section not in SECTIONS:
            raise SetupError(f"{item.name}: section {item.section!r} is not one of {SECTIONS}")
        if item.owner is not None and not 0 <= item.owner < num_writers:
            raise SetupError(
                f"{item.name}: owner {item.owner} is not one of the {num_writers} writers"
            )
