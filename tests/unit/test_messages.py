"""Every message is provoked, and names the thing, the rule and the way out."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from dmuon_platform import cli
from provocations import commands, elsewhere, plain, runs
from provocations.form import Provocation, check_words
from quoted_messages import ROOT, all_messages, messages_of, unquoted

HOW = """{count} messages are quoted by no test:
{places}
Provoke each as a user would, and match three words of it that no other message has: in a test of
yours, or with a row in tests/provocations/, whose files tell what a row says."""


@pytest.mark.parametrize("row", [*plain.ROWS, *runs.ROWS], ids=lambda row: row.thing)
def test_a_message_names_the_thing_the_rule_and_the_way_out(
    row: Provocation, tmp_path: Path
) -> None:
    row.check(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    commands.prepare(folder)
    return folder


@pytest.mark.parametrize(("line", "code", "words"), commands.ROWS, ids=lambda value: str(value))
def test_a_command_says_what_is_wrong_and_ends_with_its_code(
    line: str,
    code: int,
    words: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    try:
        found = cli.main(shlex.split(line))
    except SystemExit as end:  # of argparse
        found = end.code
    printed = capsys.readouterr()
    check_words(printed.out + printed.err, *words)
    assert found == code


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def test_no_option_leaves_it_to_argparse_to_name_our_functions() -> None:
    reads = {option.type for option in _options(cli._parser())} - {None, Path}
    assert len(reads) >= 4
    for read in reads:
        with pytest.raises(argparse.ArgumentTypeError, match="not 'x'"):
            read("x")


def test_every_message_is_quoted_by_a_test() -> None:
    missing = unquoted(all_messages(), ROOT / "tests")
    places = "\n".join(f"  {message.shown}" for message in missing)
    assert not missing, HOW.format(count=len(missing), places=places)


def test_no_message_has_the_words_of_the_code_for_what_users_call_otherwise() -> None:
    inside = ("symmetric",)  # what FSDP2 shards and AdamW updates
    said = {m.shown for m in all_messages() for part in m.parts if any(w in part for w in inside)}
    assert said == set()


def test_what_is_provoked_elsewhere_is_a_message_and_a_test() -> None:
    parts = [part for message in all_messages() for part in message.parts]
    for words in (*elsewhere.PROVOKED_BY, *elsewhere.OUT_OF_REACH):
        assert any(words in part for part in parts), f"no message has the words {words!r} any more"
    for place in elsewhere.PROVOKED_BY.values():
        file, _, function = place.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text, f"there is no test {place} any more"


def test_a_new_message_is_missed_until_a_test_quotes_it(tmp_path: Path) -> None:
    code = ROOT / "dmuon" / "never_there.py"
    known = all_messages()
    text = 'def f(x: int) -> None:\n    raise ValueError(f"{x} has lost its marbles; find them")\n'
    new = list(messages_of(code, text))
    assert [message.function for message in new] == ["f"]
    assert unquoted([*known, *new], tmp_path)[-1:] == new
    for number, text in enumerate(("has lost .*its marbles", "lost its marbles")):
        (tmp_path / f"test_{number}.py").write_text(f"match = r'{text}'\n")
        assert (new[0] in unquoted([*known, *new], tmp_path)) == (number == 0)
