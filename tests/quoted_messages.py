"""Messages in the code, and whether a test quotes them: found by syntax alone."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("dmuon", "platform/dmuon_platform")
GAP = "\0"
"""Stands for what a message fills in."""

MAKERS = {"Problem", "Finding", "warn", "PydanticCustomError"}
"""Calls that are messages beside those of errors."""

RUN = 3
"""Words in a row by which a message is known."""


@dataclass(frozen=True)
class Message:
    """A sentence that somebody may read.

    Attributes:
        place: file and line.
        function: that says it.
        parts: the text between what is filled in.
    """

    place: str
    function: str
    parts: tuple[str, ...]

    @property
    def shown(self) -> str:
        return f"{self.place} {self.function}: {'...'.join(self.parts)!r:.150}"


def unquoted(messages: list[Message], tests: Path) -> list[Message]:
    """The messages of which no test quotes `RUN` words in a row that no other message has.

    Of one without words of its own, any that it has count.
    """
    quoted = {run for text in _quotations(tests) for run in _runs(text, (2, RUN))}
    runs = {message: {r for part in message.parts for r in _runs(part)} for message in messages}
    texts_with = Counter(
        run for found in {m.parts: runs[m] for m in messages}.values() for run in found
    )

    def is_quoted(message: Message) -> bool:
        own = {run for run in runs[message] if texts_with[run] == 1}
        return not quoted.isdisjoint(own or runs[message])

    return [message for message in messages if not is_quoted(message)]


def messages_of(file: Path, text: str | None = None) -> Iterator[Message]:
    """Every call in ``text``, or in the file, that makes an error, a finding or the like."""
    tree = _tree(file) if text is None else ast.parse(text)
    raised = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not (node in raised or _name(node) in _makers()):
            continue
        inside = [function for function in functions if node in set(ast.walk(function))]
        parts = tuple(_parts_of(node, inside[-1] if inside else None))
        if parts and (_name(node) != "Finding" or _is_bad(node)):
            place = f"{file.relative_to(ROOT).as_posix()}:{node.lineno}"
            yield Message(place, inside[-1].name if inside else "module", parts)


def _is_bad(finding: ast.Call) -> bool:
    return any(state in ast.unparse(finding) for state in ("State.BROKEN", "State.POOR"))


def all_messages() -> list[Message]:
    """Those of both packages."""
    return [message for file in _files() for message in messages_of(file)]


def _files() -> list[Path]:
    return [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _makers() -> frozenset[str]:
    """Names of what makes a message: errors of Python and of ours, and `MAKERS`."""
    python = {n for n, v in vars(builtins).items() if isinstance(v, type) and "Error" in n}
    bases: dict[str, set[str]] = {}
    for file in _files():
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
    errors = python | {"Exception", "ArgumentTypeError"}
    while more := {name for name, above in bases.items() if above & errors} - errors:
        errors |= more
    return frozenset(errors | MAKERS)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def _parts_of(call: ast.Call, function: ast.FunctionDef | None) -> Iterator[str]:
    """Sentences among the arguments, or else in what local names among them stand for."""
    given = [*call.args, *(word.value for word in call.keywords if word.arg != "reads")]
    parts = [part for value in given for part in _sentences(value)]
    if not parts and function is not None:
        names = {n.id for value in given for n in ast.walk(value) if isinstance(n, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and names & {ast.unparse(t) for t in node.targets}:
                parts += _sentences(node.value)
    yield from parts


def _sentences(node: ast.AST) -> list[str]:
    parts = [part for text in _texts(node) for part in text.split(GAP)]
    return [part for part in parts if any(_runs(part))]


def _texts(node: ast.AST) -> Iterator[str]:
    """Literal texts, with a gap for each value in an f-string."""
    if isinstance(node, ast.JoinedStr):
        values = node.values
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in values)
        for value in values:
            if isinstance(value, ast.FormattedValue):
                yield from _texts(value.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.Constant):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def _quotations(tests: Path) -> Iterator[str]:
    """Texts in tests, cut where a pattern takes anything, without escapes."""
    for file in tests.rglob("*.py"):
        for node in ast.walk(_tree(file)):
            for text in _texts(node) if isinstance(node, ast.Constant | ast.JoinedStr) else ():
                for part in re.split(rf"{GAP}|\.[*+]|\\[dwWsSDA]\S?|\n", text):
                    yield re.sub(r"\\(.)", r"\1", part)


def _runs(text: str, lengths: tuple[int, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Runs of words of these lengths, or else those by which a message is known."""
    words = re.findall(r"[\w./-]*\w", text)
    for length in lengths or (min(RUN, len(words)),):
        if length > 1:
            yield from (tuple(words[at : at + length]) for at in range(len(words) - length + 1))
