"""Processes of ours import what we import, wherever they start."""

import subprocess
from pathlib import Path

import dmuon_platform
from dmuon_platform.child_process import command_of, environment

import dmuon

ASKED = """
import importlib.util
for name in ("dmuon", "dmuon_platform"):
    print(importlib.util.find_spec(name).origin)
"""


def test_a_clone_in_the_working_folder_does_not_hide_what_we_run(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for package in ("dmuon", "dmuon_platform"):
        (here / package).mkdir(parents=True)
        (here / package / "__init__.py").touch()
    elsewhere.mkdir()
    (elsewhere / "asked.py").write_text(ASKED, encoding="utf-8")
    found = environment()
    found["PYTHONPATH"] += f":{elsewhere}"
    answer = subprocess.run(
        command_of("asked"), cwd=here, env=found, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [dmuon.__file__, dmuon_platform.__file__]
