"""Everything that is wrong with a job is said at once, each with its rule and its way out."""

from typing import Any

import pytest
from dmuon_platform.errors import SpecError
from dmuon_platform.spec import JobSpec, job_of
from dmuon_platform.spec.fields import all_keys
from dmuon_platform.spec.synonyms import SYNONYMS
from small_job import SMALL, small


def complaint(**changes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        job_of(small(**changes))
    return str(caught.value)


def test_a_job_without_mistakes_is_accepted() -> None:
    assert job_of(SMALL).train.global_batch_size == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__global_batch_sise": 4}, "did you mean train.global_batch_size?"),
        ({"optim": {"lr": 1.0}}, "optim: there is no such key or section; did you mean optimizer?"),
        ({"steps": 10}, "steps: there is no such key or section; did you mean train.steps?"),
        ({"data__seed": 1}, "did you mean train.seed?"),
        ({"banana": 1}, "a job file has name, storage, model, data"),
        ({"resources__workers": {"min": 1, "mx": 2}}, "did you mean resources.workers.max?"),
        ({"optimizer__learning_rate": 1e-3}, "did you mean optimizer.lr?"),
        ({"optimizer__betas": [0.9, 0.95]}, "did you mean optimizer.adamw_betas?"),
        ({"optimizer__dtype": "bfloat16"}, "did you mean optimizer.ns_dtype?"),
        ({"optimizer__num_steps": 5}, "did you mean optimizer.ns_steps?"),
        ({"faults__max_steps": 5}, "did you mean faults.max_skips?"),
        ({"train__local_batch_size": 8}, "did you mean train.micro_batch_size?"),
        ({"train__num_workers": 8}, "did you mean resources.workers?"),
        ({"train_steps": 8}, "did you mean train.steps?"),
        ({"train__batch_size": 8}, "did you mean train.global_batch_size?"),
        ({"epochs": 3}, "did you mean train.steps?"),
        ({"trainer": {"x": 1}, "max-steps": 5}, "max-steps: there is no such key"),
        ({"max-steps": 5}, "did you mean train.steps?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(changes: dict[str, Any], words: str) -> None:
    assert words in complaint(**changes)


def test_what_others_call_a_key_is_none_of_ours_and_stands_for_one() -> None:
    keys = set(all_keys())
    leaves = {key.rpartition(".")[2] for key in keys}
    assert len(SYNONYMS) > 100
    assert set(SYNONYMS.values()) <= keys
    assert not SYNONYMS.keys() & (leaves | keys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__steps": "10"}, 'train.steps: must be a whole number, not "10"'),
        ({"train__steps": 1.5}, "train.steps: must be a whole number, not 1.5"),
        ({"train__steps": True}, "train.steps: must be a whole number, not true"),
        ({"train__compile": 1}, "train.compile: must be true or false, not 1"),
        ({"optimizer__lr": "x"}, 'optimizer.lr: must be a number, not "x"; write lr = 0.02, say'),
        ({"optimizer__lr": float("nan")}, "optimizer.lr: must be a finite number"),
        ({"name": 3}, "name: must be text, not 3"),
        ({"train": 5}, "train: must be a table, not 5; write [train] with its keys (steps,"),
        ({"data__source": 5}, "data.source: must be text, or a list of texts, not 5"),
        ({"data__source": ["a", 5]}, "data.source: must be text, not 5"),
        ({"resources__workers": "2"}, "must be a whole number, or a table {min = 2, max = 4}"),
        ({"optimizer__adamw_betas": [0.9]}, "optimizer.adamw_betas: must have more items"),
        ({"optimizer__adamw_betas": [0.9, "x"]}, "optimizer.adamw_betas: must be a number"),
    ],
)
def test_a_wrong_type_is_said_in_plain_words(changes: dict[str, Any], words: str) -> None:
    assert words in complaint(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer__lr": -0.1}, "optimizer.lr: must be at least 0, not -0.1"),
        ({"optimizer__momentum": 1.0}, "optimizer.momentum: must be below 1, not 1.0"),
        ({"optimizer__ns_steps": 0}, "optimizer.ns_steps: must be above 0, not 0"),
        ({"optimizer__adamw_betas": [0.9, 1.0]}, "optimizer.adamw_betas: must be below 1"),
        ({"optimizer__adjust_lr_fn": "orignal"}, 'write adjust_lr_fn = "original"'),
        ({"optimizer__ns_dtype": "float16"}, "must be 'float32' or 'bfloat16', not \"float16\""),
        ({"schedule__kind": "cosin"}, 'write kind = "cosine"'),
        ({"schedule__decay_steps": 2}, "schedule.decay_steps: has no effect with"),
        ({"schedule__min_ratio": 0.1}, "schedule.min_ratio: has no effect with"),
        ({"schedule__warmup_steps": 11}, "11 is longer than the whole run of 10 steps"),
        ({"train__clip_grad_norm": 0.0}, "train.clip_grad_norm: must be above 0"),
        ({"train__tokens": 5}, "exactly one of train.steps and train.tokens"),
        ({"train__steps": None}, "and neither is there; write train.steps = 1000, say"),
        ({"model__hidden_size": 100}, "nearest good values: 96 or 104"),
        ({"model__num_key_value_heads": 3}, "3 must divide the 4 attention heads; choose one of 1"),
        ({"model__vocab_size": 255}, "255 is too few for byte tokens; write vocab_size = 256"),
        ({"model": {"path": "x", "hidden_size": 8}}, "model.hidden_size: has no meaning beside"),
        ({"name": "a b"}, "name: must be letters, digits, '.', '_' and '-'"),
        ({"name": "../up"}, "name: must be letters"),
        ({"name": "data"}, "name: must not be one of data,"),
        ({"storage": "s3://bucket/runs"}, "storage: must be a folder, not a URL"),
        (
            {"tracking": {"uri": "127.0.0.1:5000"}},
            "tracking.uri: must begin with its scheme; write http://127.0.0.1:5000",
        ),
        ({"storage": "a\0b"}, "storage: must be a folder, whose name has no NUL character"),
        ({"faults__stall_s": 1e-9}, "faults.stall_s: must be at least 1, not 1e-09"),
        ({"faults__timeout_s": 1e300}, "faults.timeout_s: must be at most 1e+09, not 1e+300"),
        (
            {"checkpoint": {"every": 100, "keep_every": 250}},
            "checkpoint.keep_every: 250 is not a multiple of checkpoint.every = 100, so some of "
            "these steps have no checkpoint; write keep_every = 300",
        ),
        (
            {"checkpoint": {"every": 100, "keep_best": 1}, "evaluation__every": 200},
            "every 100 steps, and they are 200 steps apart; write evaluation.every = 100",
        ),
        (
            {"checkpoint": {"every": 100, "keep_best": 1}, "evaluation__every": None},
            "checkpoint.keep_best: the best are told by an evaluation at each checkpoint, every "
            "100 steps, and there is none; write evaluation.every = 100",
        ),
        ({"checkpoint__keep_best": -1}, "checkpoint.keep_best: must be at least 0"),
        ({"checkpoint__keep_every": 0}, "checkpoint.keep_every: must be above 0"),
        ({"data__validation_fraction": 1.0}, "data.validation_fraction: must be below 1"),
        ({"data__source": []}, "data.source: must have at least 1 item"),
        ({"resources__gpus_per_worker": 2}, "resources.gpus_per_worker: must be at most 1"),
        ({"resources__workers": {"min": 4, "max": 2}}, "write {min = 2, max = 4}"),
        ({"resources__address": "ray://head:10001"}, "'ray://head:10001' is not 'host:port' of a"),
        (
            {"resources__address": "http://head:8265"},
            "from outside the cluster use dmuon submit",
        ),
        ({"resources__address": "head"}, "write its own port, 6379 unless changed"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(
    changes: dict[str, Any], words: str
) -> None:
    assert words in complaint(**changes)


@pytest.mark.parametrize(
    ("mesh", "workers", "words"),
    [
        ({"replicate": 3}, 2, "mesh.replicate: 3 does not divide 2 workers; choose one of 1, 2"),
        ({"replicate": 2, "shard": 2}, 2, "2 x 2 places do not fit 2 workers; set"),
        ({"replicate": 2, "shard": 2}, 6, "set mesh.replicate = none, for 3 x 2, or resources"),
        ({"replicate": 3, "shard": 2}, 9, "set mesh.shard = none, for 3 x 3, or resources"),
        ({"replicate": 3, "shard": 2}, 7, "= 6, or leave one of the two out ('none')"),
        ({"replicate": None, "shard": 3}, 4, "mesh.shard: 3 does not divide 4 workers"),
        ({"replicate": None}, 2, "only one of mesh.replicate and mesh.shard can be inferred"),
        ({"replicate": 2}, {"min": 2, "max": 3}, "2 does not divide 3 workers"),
    ],
)
def test_an_impossible_mesh_is_refused(mesh: dict[str, Any], workers: Any, words: str) -> None:
    text = complaint(mesh=mesh, resources__workers=workers, train__global_batch_size=192)
    assert words in text


@pytest.mark.parametrize(
    ("batch", "micro", "workers", "words"),
    [
        (30, 8, 2, "nearest good values: 16 or 32, or micro_batch_size = 5"),
        (7, 2, 2, "7 sequences do not divide into 2 workers x micro-batches of 2; nearest good"),
        (4, 8, 2, "nearest good values: 16, or micro_batch_size = 2"),
        (32, 8, {"min": 3, "max": 4}, "3 or 4 workers x micro-batches of 8; nearest good"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_good_ones(
    batch: int, micro: int, workers: Any, words: str
) -> None:
    text = complaint(
        train__global_batch_size=batch, train__micro_batch_size=micro, resources__workers=workers
    )
    assert words in text


def test_all_mistakes_of_a_file_are_reported_together() -> None:
    text = complaint(
        evaluation__evry=3,
        optimizer__lr="x",
        mesh__shard=3,
        schedule__warmup_steps=50,
        model__hidden_size=100,
    )
    keys = ("evaluation.evry", "optimizer.lr", "mesh.shard", "schedule.warmup", "model.hidden_size")
    for key in keys:
        assert f"\n  {key}" in text
    assert text.startswith("the job has 5 problems:")


def test_a_rule_is_silent_about_keys_that_are_wrong_themselves() -> None:
    text = complaint(train__micro_batch_size="8", train__global_batch_size=30)
    assert "1 problem" in text
    assert "divide" not in text


def test_a_misspelt_required_key_is_one_mistake_and_not_two() -> None:
    document = small(train__micro_batch_sise=8)
    del document["train"]["micro_batch_size"]
    with pytest.raises(SpecError, match="1 problem") as caught:
        job_of(document)
    assert "is required" not in str(caught.value)


def test_a_missing_section_is_named_with_its_keys() -> None:
    with pytest.raises(SpecError, match=r"data: is required; write \[data\] with its keys \(sou"):
        job_of({})


def test_no_message_speaks_of_pydantic() -> None:
    text = complaint(train="x", optimizer__lr="x", banana=1, resources__workers=[])
    for word in ("pydantic", "Input", "input_value", "_type", "errors.pydantic.dev", "validation"):
        assert word not in text


def test_a_job_cannot_be_changed() -> None:
    job = job_of(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        job.train.steps = 3  # type: ignore[misc]
    assert isinstance(job, JobSpec)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "kil", "step": 1}, 'write kind = "kill"'),
        ({"kind": "kill"}, "faults.inject.step: is required; write step = 10, say"),
        ({"kind": "kill", "step": 0}, "faults.inject.step: must be above 0, not 0"),
        ({"kind": "kill", "step": 11}, "11 is beyond the whole run of 10 steps"),
        ({"kind": "kill", "step": 1, "rank": 2}, "2 is no rank of at most 2 workers"),
        ({"kind": "kill", "step": 1, "rank": -1}, "faults.inject.rank: must be at least 0"),
        ({"kind": "kill", "step": 1, "rank": "al"}, 'must be a rank from 0, or "all", not "al"'),
        ({"kind": "kill", "stp": 1}, "did you mean faults.inject.step?"),
        ({"kind": "kill", "step": 1, "seconds": 2.0}, "seconds: is for slow and stall, not for"),
        ({"kind": "slow", "step": 1}, "faults.inject.seconds: is required by slow"),
        ({"kind": "spike", "step": 1}, "faults.inject.factor: is required by spike"),
        ({"kind": "kill_controller", "step": 1, "rank": "all"}, "happens once"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused(fault: dict[str, Any], words: str) -> None:
    good = {"kind": "stall", "step": 2, "rank": "all"}
    assert words in complaint(faults={"inject": [good, fault]})


def test_a_fault_may_not_be_there_twice() -> None:
    fault = {"kind": "kill", "step": 1}
    words = "kill-step-1-rank-0 is there 2 times; write times = 2"
    assert words in complaint(faults={"inject": [fault, fault]})
