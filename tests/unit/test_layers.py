"""Who may import whom, and that no folder of ours hides a module of Python's own library."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("dmuon", "platform/dmuon_platform")
OURS = {"dmuon_platform", "dmuon"}

MAY_IMPORT: dict[str, set[str]] = {  # the most specific path decides
    "dmuon/": {"dmuon", "torch"},
    "dmuon/checkpoint": {"dmuon", "torch", "safetensors"},
    "platform/dmuon_platform/": OURS | {"torch", "numpy"},
    # what a laptop needs to check a job
    "platform/dmuon_platform/errors.py": set(),
    "platform/dmuon_platform/spec/": {"dmuon_platform", "pydantic", "pydantic_core", "yaml"},
    "platform/dmuon_platform/cli.py": {"dmuon_platform"},
    # ray, each file named
    "platform/dmuon_platform/attempts.py": OURS | {"ray"},
    "platform/dmuon_platform/cluster.py": OURS | {"ray"},
    "platform/dmuon_platform/saving.py": OURS | {"torch", "ray"},
    "platform/dmuon_platform/remote_jobs.py": OURS | {"ray"},
    "platform/dmuon_platform/submission.py": OURS | {"ray"},
    "platform/dmuon_platform/uploads.py": OURS | {"ray"},
    "platform/dmuon_platform/data/tokenise.py": OURS | {"ray", "numpy", "pyarrow"},
    # mlflow, each file named
    "platform/dmuon_platform/metric_delivery.py": OURS | {"mlflow"},
    "platform/dmuon_platform/model_signature.py": OURS | {"mlflow", "numpy"},
    "platform/dmuon_platform/registry.py": OURS | {"mlflow"},
    "platform/dmuon_platform/tracked_run.py": OURS | {"mlflow"},
    # other libraries, each where it belongs
    "platform/dmuon_platform/checkpoint_copy.py": OURS | {"pyarrow"},
    "platform/dmuon_platform/data/documents.py": OURS | {"pyarrow"},
    "platform/dmuon_platform/data/tokenizer.py": OURS | {"numpy", "tokenizers"},
    "platform/dmuon_platform/launch.py": OURS | {"rich"},
    "platform/dmuon_platform/job_draft.py": OURS | {"torch"},
    "platform/dmuon_platform/machine_checks.py": OURS | {"torch", "psutil", "packaging"},
    "platform/dmuon_platform/model/huggingface.py": OURS | {"torch", "transformers"},
    "platform/dmuon_platform/model/weights.py": OURS | {"torch", "safetensors"},
    "platform/dmuon_platform/picture.py": OURS | {"matplotlib"},
    "platform/dmuon_platform/plots.py": OURS | {"matplotlib"},
    "platform/dmuon_platform/sweep/picture.py": OURS | {"matplotlib"},
    "platform/dmuon_platform/progress.py": OURS | {"rich"},
    "platform/dmuon_platform/progress_bar.py": {"rich"},
    "platform/dmuon_platform/ray_session.py": OURS | {"psutil"},
    "platform/dmuon_platform/system_sampler.py": OURS | {"psutil"},
    "platform/dmuon_platform/weights_digest.py": OURS | {"torch", "safetensors"},
}
FILES = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]

SPEC_KNOWS = ("dmuon_platform.spec", "dmuon_platform.errors")


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def path_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", FILES, ids=path_of)
def test_a_room_imports_only_what_it_may(file: Path) -> None:
    path = path_of(file)
    allowed = MAY_IMPORT[max((room for room in MAY_IMPORT if path.startswith(room)), key=len)]
    for module in imported_modules(file):
        package = module.partition(".")[0]
        assert package in allowed | sys.stdlib_module_names, f"{path} may not import {module}"


@pytest.mark.parametrize("file", FILES, ids=path_of)
def test_the_platform_uses_only_the_public_names_of_the_library(file: Path) -> None:
    path = path_of(file)
    if path.startswith("platform"):
        for module in imported_modules(file):
            reaches_in = module.startswith("dmuon.")
            assert not reaches_in, f"{path} reaches into {module}: use the public names of dmuon"


@pytest.mark.parametrize(
    "file", [file for file in FILES if "/spec/" in file.as_posix()], ids=path_of
)
def test_the_spec_knows_nothing_of_the_rest_of_the_platform(file: Path) -> None:
    for module in imported_modules(file):
        if module.startswith("dmuon_platform"):
            assert module.startswith(SPEC_KNOWS), f"{path_of(file)} may not import {module}"


def test_every_rule_is_about_something_that_exists() -> None:
    paths = [path_of(file) for file in FILES]
    for room in MAY_IMPORT:
        assert any(path.startswith(room) for path in paths), f"nothing is at {room} any more"


def test_jobs_import_the_command_alone() -> None:
    for file in (ROOT / "jobs").glob("*.py"):
        modules = set(imported_modules(file)) - sys.stdlib_module_names
        assert modules <= {"dmuon_platform.cli"}, f"{path_of(file)} imports {modules}"


def test_no_folder_of_ours_is_a_package_called_platform() -> None:
    for shadow in ("platform/__init__.py", "platform.py", "jobs/platform.py", "jobs/__init__.py"):
        assert not (ROOT / shadow).exists(), f"{shadow} would hide Python's own module `platform`"


@pytest.mark.parametrize("how", [["-c"], ["-m", "timeit", "-n1", "-r1", "-s"]])
def test_platform_is_pythons_own_from_the_root_of_the_repository(how: list[str]) -> None:
    program = "import platform; assert platform.system(); print(platform.__file__)"
    done = subprocess.run(
        [sys.executable, *how, program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout
