"""One undisturbed run that all cluster tests compare with, and real MLflow servers."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import driver
from mlflow_runs import Server


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A few files of the standard library in one: real text, prepared in a moment."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "ast.py", "datetime.py", "inspect.py", "subprocess.py", "typing.py")
    file = tmp_path_factory.mktemp("text") / "library.txt"
    file.write_text(
        "\n".join((library / name).read_text() for name in names if (library / name).exists())
    )
    return file


@pytest.fixture(scope="session")
def reference(tmp_path_factory, text) -> tuple[driver.Run, str]:
    """The main job at a small size, run from the command line without any disturbance."""
    run = driver.make_run(tmp_path_factory.mktemp("reference"), text)
    code, output = driver.run("run", run.job)
    assert code == 0, output
    return run, output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests may kill and start again."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()
