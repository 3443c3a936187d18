"""What a person gets who asks for something impossible: one message, an exit code, no trace."""

import socket

import pytest
from cluster import driver

pytestmark = pytest.mark.cluster


def _closed_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def test_bad_input_is_refused_before_workers_start(text, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    a_file = tmp_path / "a_file"
    a_file.touch()
    address = _closed_address()
    cases = {  # --set arguments: exit code, what the message must say
        ("optimizer.learning_rate=1",): (78, "optimizer.learning_rate", "lr"),
        ("data.source=nowhere/*.txt",): (78, "nowhere/*.txt", "data.source"),
        (f"data.source={empty}",): (78, "no text", ""),
        (f"resources.address={address}",): (69, address, "resources.address"),
        (f"storage={a_file}",): (1, str(a_file), "storage"),
        # The text is prepared before that shows.
        ("train.global_batch_size=10000000",): (78, "train.global_batch_size", "samples"),
        ("optimizer.lr=0.5", "name=started"): (78, "optimizer.lr", "0.5"),
    }
    run = driver.make_run(tmp_path, text)
    started = run.folder.with_name("started")
    started.mkdir(parents=True)
    (started / "job.toml").write_text(run.job.read_text())
    processes = [driver.start("run", run.job, *driver.settings(*case)) for case in cases]
    client = driver.start("run", run.job, RAY_ADDRESS="ray://127.0.0.1:10001")
    nobody = driver.start("run", run.job, RAY_ADDRESS=address)
    for (case, (code, *words)), process in zip(cases.items(), processes, strict=True):
        found, output = driver.finish(process)
        assert found == code, (case, output)
        assert all(word in output for word in words), (case, output)
        assert "Traceback" not in output, (case, output)
    code, output = driver.finish(client)
    assert code == 78, output
    assert "RAY_ADDRESS = 'ray://127.0.0.1:10001' is Ray Client" in output
    code, output = driver.finish(nobody)
    assert code == 69, output
    assert f"No Ray cluster answers at RAY_ADDRESS = '{address}'" in output
    assert not run.events("training_started")
