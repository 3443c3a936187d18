"""What the documents print is true of the code: commands parse, blocks compile, links lead on."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from dmuon_platform import cli
from printed import block

import dmuon
from dmuon.bench import command

ROOT = Path(__file__).parents[2]
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
).stdout.split()
DOCUMENTS = [ROOT / name for name in LISTED] or sorted(ROOT.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (document.relative_to(ROOT).as_posix(), text)
        for document in DOCUMENTS
        for kind, text in BLOCK.findall(document.read_text(encoding="utf-8"))
        if kind == language
    ]


def commands() -> list[tuple[str, list[str]]]:
    """Every command of every bash block, as words, by document."""
    found = []
    for document, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;", line):
                if words := shlex.split(part, comments=True):
                    found.append((document, words))
    return found


def of_program(*program: str) -> list[object]:
    """The arguments of each command of that program, wherever it is installed."""
    found = []
    for document, (first, *rest) in commands():
        words = [Path(first).name, *rest]
        if tuple(words[: len(program)]) == program:
            arguments = words[len(program) :]
            found.append(pytest.param(arguments, id=f"{document}: {shlex.join(arguments)}"))
    return found


def test_there_are_documents_with_commands() -> None:
    assert {"README.md", "dmuon/GUIDE.md", "platform/README.md"} <= {name for name, _ in commands()}
    assert len(of_program("dmuon")) > 20


@pytest.mark.parametrize("arguments", of_program("dmuon"))
def test_a_command_of_the_platform_has_these_arguments(arguments: list[str]) -> None:
    cli._parser().parse_args(arguments)


def test_a_plan_for_many_gpus_begins_as_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    command = block("platform/README.md", "a plan for many", "bash").replace("\\\n", "")
    _, *arguments = shlex.split(command)
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith(
        block("platform/README.md", "its first lines", "text")
    )


@pytest.mark.parametrize("arguments", of_program("python", "-m", "dmuon.bench"))
def test_a_benchmark_has_these_arguments(arguments: list[str]) -> None:
    command._parser().parse_args(arguments)


@pytest.mark.parametrize(("document", "text"), blocks("python"))
def test_a_block_of_python_is_python(document: str, text: str) -> None:
    tree = ast.parse(text, document)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "dmuon"
    }
    assert [name for name in sorted(used) if not hasattr(dmuon, name)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_what_is_there(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    ours = [link for link in links if not link[0].startswith(("http://", "https://"))]
    files = [(document.parent / file if file else document, heading) for file, heading in ours]
    assert [file for file, _ in files if not file.exists()] == []
    assert [link for link in files if link[1] and link[1] not in _anchors(link[0])] == []


def _anchors(document: Path) -> set[str]:
    """By which GitHub reaches the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_moving_a_script_leads_to_what_a_script_may_have_more() -> None:
    headings = {heading for _, heading in LINK.findall((ROOT / "dmuon/MOVING.md").read_text())}
    assert "parameter-groups" in headings
