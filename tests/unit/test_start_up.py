"""What is imported before it is needed: nothing that takes long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dmuon_platform.driver_lease import DriverLease
from dmuon_platform.spec import JobSpec
from small_job import small

ROOT = Path(__file__).parents[2]


def imported_by(program: str) -> set[str]:
    """Names of all modules that a Python has imported which runs this."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print('|', *sys.modules)"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platform'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.rpartition("|")[2].split())


def help_of(*arguments: str) -> str:
    return (
        f"from dmuon_platform.cli import main\n"
        f"try: main([*{arguments!r}, '--help'])\nexcept SystemExit as end: assert not end.code"
    )


@pytest.mark.parametrize("arguments", [(), ("plan",), ("checkpoint", "list")])
def test_help_needs_only_the_standard_library(arguments: tuple[str, ...]) -> None:
    bare, with_help = imported_by("pass"), imported_by(help_of(*arguments))
    packages = {module.partition(".")[0] for module in with_help - bare}
    assert packages - sys.stdlib_module_names == {"dmuon_platform"}


def test_importing_the_library_is_importing_torch() -> None:
    """DTensor and FSDP2, which take as long again, come with the first name that needs them."""
    added = imported_by("import dmuon") - imported_by("import torch")
    assert all(module.partition(".")[0] == "dmuon" for module in added), sorted(added)
    used = imported_by("import dmuon; dmuon.Muon")
    assert {"torch.distributed.fsdp", "torch.distributed.tensor"} <= used


def test_all_public_names_are_there_however_they_are_asked_for() -> None:
    program = """
import dmuon
names = set(dmuon.__all__)
assert names <= set(dir(dmuon)) and not hasattr(dmuon, "nothing")
from dmuon import *
assert names <= set(globals()) and callable(dmuon.newton_schulz) and callable(newton_schulz)
assert dmuon.Muon is Muon is dmuon.optimizer.Muon
"""
    assert "dmuon.on_demand" in imported_by(program)


def test_what_steers_the_workers_does_not_import_what_they_do() -> None:
    """Ray's controller imports this after the driver has, and before the workers begin."""
    assert not {"dmuon_platform.training", "torch.distributed.fsdp"} & imported_by(
        "import dmuon_platform.attempts"
    )


def test_a_second_launch_is_refused_before_torch_and_ray_are_imported(tmp_path: Path) -> None:
    job = tmp_path / "small.toml"
    spec = JobSpec.model_validate(small(storage=str(tmp_path)))
    spec.run_dir.mkdir()
    for file in (job, spec.run_dir / "job.toml"):
        file.write_text(spec.to_toml())
    (spec.run_dir / "events.jsonl").touch()
    resume = ["resume", "small", "--storage", str(tmp_path)]
    with DriverLease(spec.run_dir):
        for arguments in (["run", str(job)], resume):
            added = imported_by(
                f"from dmuon_platform.cli import main\nassert main({arguments!r}) == 3"
            )
            assert not {"torch", "ray", "mlflow"} & added
        assert not list(spec.run_dir.glob("checkpoints"))
