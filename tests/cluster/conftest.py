"""One undisturbed run that all cluster tests compare with, and real MLflow servers."""

import fcntl
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import driver
from cluster.machines import Machines
from mlflow_runs import Server


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes that share the tests of this session (``-n 2``)."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def text(session_folder: Path) -> Path:
    """A few files of the standard library in one: real text, prepared in a moment."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "ast.py", "datetime.py", "inspect.py", "subprocess.py", "typing.py")
    lines = "\n".join((library / name).read_text() for name in names if (library / name).exists())
    file = session_folder / "library.txt"
    writing = file.with_suffix(f".{os.getpid()}")
    writing.write_text(lines)
    writing.replace(file)  # another process may be reading it
    return file


@pytest.fixture(scope="session")
def reference(session_folder: Path, text: Path) -> tuple[driver.Run, str]:
    """The main job at a small size, run from the command line without any disturbance."""
    folder = session_folder / "reference"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for what the first one does
        run = driver.make_run(folder, text)
        ended = folder / "ended.json"
        if not ended.exists():
            ended.write_text(json.dumps(driver.run("run", run.job)))
    code, output = json.loads(ended.read_text())
    assert code == 0, output
    return run, output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests may kill and start again."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def machines() -> Iterator[Machines]:
    """A cluster without room, to which machines may be added."""
    machines = Machines()
    yield machines
    machines.close()
