"""What a fine-tuning starts from is evaluated before the first step, once in the whole run."""

from pathlib import Path

import pytest
from dmuon_platform.events import Journal
from dmuon_platform.line_file import LineFile
from dmuon_platform.spec import JobSpec
from dmuon_platform.spool import MetricsSpool
from ranks_runner import run_ranks
from worker_runs import run_worker, worker_job


class BrokenError(Exception):
    pass


def _break() -> None:
    raise BrokenError


def test_the_start_is_worth_what_the_earlier_run_came_to_and_is_not_evaluated_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    earlier = worker_job(tmp_path)
    folder = earlier.run_dir / "checkpoints" / "step-00000012"
    tuned = worker_job(tmp_path, "tuned", model={"path": str(folder)}, evaluation={"every": 4})
    older = worker_job(tmp_path, "older", model={"path": str(folder)}, train__steps=2)
    MetricsSpool(older.run_dir).append(1, {"train/loss": 1.0}, 0.0)  # begun by another version

    def on_rank(_: int) -> None:
        run_worker(earlier)
        with pytest.raises(BrokenError):  # before there is any checkpoint
            run_worker(tuned, 1, at_step=3, action=_break)
        run_worker(tuned, 2)
        run_worker(older)

    run_ranks(1, on_rank, timeout_s=120)
    (end,) = [line for line in _lines(earlier) if line["step"] == 12]
    starts = [line for line in _lines(tuned) if line["step"] == 0]
    assert [sorted(line["metrics"]) for line in starts] == [
        ["evaluation/bigram_bits_per_byte", "evaluation/bits_per_byte", "evaluation/loss"]
    ]
    assert starts[0]["metrics"]["evaluation/loss"] == pytest.approx(
        end["metrics"]["evaluation/loss"], rel=1e-5
    )
    assert [line["step"] for line in _lines(earlier)] == list(range(1, 13))
    assert {line["step"] for line in _lines(older)} == {1, 2}  # no 0 behind them
    told = [event for event in Journal(tuned.run_dir).read() if event["kind"] == "evaluated"]
    assert [event["step"] for event in told] == [0, 4, 8, 12]
    assert told[0]["loss"] == starts[0]["metrics"]["evaluation/loss"]


def _lines(spec: JobSpec) -> list[dict]:
    return [line.content for line in LineFile(spec.run_dir / "metrics.jsonl").lines()]
