"""How many workers an attempt gets."""

import io

import pytest
from dmuon_platform import driving
from dmuon_platform.elastic import NodeRoom, choose_workers, num_places, shortage
from dmuon_platform.errors import GracefulStop
from dmuon_platform.progress import ProgressView
from dmuon_platform.spec import job_of
from dmuon_platform.spec.batch import accumulation
from dmuon_platform.stop_request import StopFile, StopRequest
from rich.console import Console
from small_job import small


def job(workers, **changes):
    changes = {"train__global_batch_size": 48, "train__micro_batch_size": 2} | changes
    return job_of(small(resources__workers=workers, **changes))


def free(cpus, gpus):
    return NodeRoom(cpus, gpus, 64, 8)


@pytest.mark.parametrize(
    ("places", "chosen"), [(1, None), (2, 2), (3, 3), (4, 4), (5, 4), (6, 6), (7, 6), (9, 8)]
)
def test_the_largest_number_that_fits_mesh_and_batch_is_taken(places, chosen):
    spec = job({"min": 2, "max": 8})
    assert spec.fitting_workers == [2, 3, 4, 6, 8]  # 24 micro-batches
    assert choose_workers(spec, places) == chosen


def test_a_fixed_number_of_replicas_leaves_out_what_it_does_not_divide():
    spec = job({"min": 2, "max": 8}, mesh={"replicate": 2})
    assert spec.fitting_workers == [2, 4, 6, 8]
    assert [spec.resolve_mesh(n) for n in spec.fitting_workers] == [(2, 1), (2, 2), (2, 3), (2, 4)]
    assert all(n * 2 * accumulation(spec.train, n) == 48 for n in spec.fitting_workers)


def test_a_fixed_world_takes_nothing_else():
    spec = job(4)
    assert [choose_workers(spec, places) for places in (3, 4, 9)] == [None, 4, 4]


def test_a_worker_is_on_one_machine_and_none_is_on_one_that_leaves():
    nodes = [free(3, 0), free(3, 0), NodeRoom(8, 0, 8, 0, is_leaving=True)]
    assert num_places(job({"min": 2, "max": 8}), nodes) == 6
    assert num_places(job({"min": 2, "max": 8}, resources__cpus_per_worker=2), nodes) == 2
    gpus = job({"min": 2, "max": 8}, resources__gpus_per_worker=1)
    assert num_places(gpus, [free(64, 4), free(2, 4)]) == 6


def test_what_is_missing_is_said():
    text = shortage(job(4, resources__cpus_per_worker=4), [free(3, 0), free(4, 1)])
    assert "4 workers need 16 CPUs, and 7 CPUs and 1 GPUs are free on the 2 machines" in text


class Session:
    """In place of a Ray: trains for three looks, and its machine is told to leave meanwhile."""

    is_connected = True
    looks = 0

    def room(self):
        return [NodeRoom(1, 0, 2, 0, is_leaving=self.looks > 0)]

    def start_attempt(self, num_workers, config):
        pass

    def look(self):
        self.looks += 1
        return None if self.looks < 4 else {"step": 10}


def test_a_request_for_other_workers_that_cannot_be_written_does_not_end_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(driving, "ROOM_S", 0.0)
    monkeypatch.setattr(driving, "REFRESH_S", 0.01)
    spec = job_of(small(storage=str(tmp_path), resources__workers=1))
    (spec.run_dir / "stop.json").mkdir(parents=True)  # nothing can take its place
    view = ProgressView(spec, Console(file=io.StringIO()))
    assert driving.Driving(spec, Session(), view, "launch", {}).run() == (1, {"step": 10})


@pytest.mark.parametrize("reason", ["nightly backup", "SIGTERM"])
def test_who_launched_a_run_hears_that_another_asks_it_to_stop(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(driving, "REFRESH_S", 0.01)
    spec = job_of(small(storage=str(tmp_path), resources__workers=1))
    spec.run_dir.mkdir()
    out = io.StringIO()
    view = ProgressView(spec, Console(file=out, width=500))

    class Asked(Session):
        def start_attempt(self, num_workers, config):
            StopFile(spec.run_dir).write(StopRequest.now("launch", reason))

        def close(self, *, at_once=False):
            assert at_once

    with pytest.raises(GracefulStop, match="it had not begun"):
        driving.Driving(spec, Asked(), view, "launch", {}).run()
    is_signal = reason == "SIGTERM"  # of which its own terminal has been told already
    assert out.getvalue().endswith(f" asks to stop: {reason}\n") is not is_signal
