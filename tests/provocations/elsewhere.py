"""Messages that tests provoke without quoting them, and those that no test can provoke.

Each is known by three words of it that no other message has, which are its quotation. One that is
quoted by the test that provokes it, as most are, need not be here.
"""

PROVOKED_BY = {
    "the ranks of the mesh have different models": (
        "ranks/test_setup_errors.py::test_ranks_with_different_models_are_told_where"
    ),
    "cannot be written: give a file in a folder": (
        "ranks/test_bench.py::test_bad_arguments_are_one_line_and_exit_code_2"
    ),
    "needs a package that is not installed: pip": (
        "ranks/test_bench.py::test_bad_arguments_are_one_line_and_exit_code_2"
    ),
    "for the first rank, though a rank has written it": (
        "ranks/test_checkpoint_storage.py::test_a_rank_that_has_other_storage_under_the_path"
    ),
    "reading failed halfway, so the model must be loaded again": (
        "ranks/test_checkpoint_misfits.py::"
        "test_reading_that_fails_halfway_on_one_rank_is_told_to_all"
    ),
    "bytes, not": (
        "ranks/test_checkpoint_misfits.py::test_damage_that_one_rank_finds_is_the_same_error_on_all"
    ),
    ", which the index says it has": (
        "unit/test_checkpoint_source.py::test_an_index_that_does_not_fit_its_files_is_refused"
    ),
    "it does not hold what the manifest says": (
        "unit/test_checkpoint_damage.py::test_tensors_are_compared_with_the_manifest_when_read"
    ),
    "it ends within": (
        "unit/test_checkpoint_damage.py::"
        "test_a_file_cut_after_it_was_opened_is_an_error_and_not_the_end_of_the_process"
    ),
    "the optimizer state": "ranks/test_splits_kept.py::test_torch_gets_no_stack_of_matrices",
    "the state of torch's optimizers": (
        "ranks/test_torch_optimizers.py::test_what_dmuon_does_not_know_is_refused"
    ),
    "was replaced, removed or converted after dedicate_params": (
        "ranks/test_models_at_odds.py::test_a_model_changed_between_dedication_and_optimizer"
    ),
    "another rank is gone, or took longer than the timeout": (
        "ranks/test_checkpoint_at_exit.py::"
        "test_a_rank_that_fails_takes_those_with_it_that_wait_for_its_part"
    ),
    "held-out samples": (
        "unit/test_data_sampling.py::test_held_out_samples_are_fixed_and_each_comes_once"
    ),
    "bytes long": (
        "unit/test_data_writing.py::test_an_unfinished_or_damaged_dataset_is_not_opened"
    ),
    "The training text has": (
        "unit/test_data_writing.py::test_too_little_text_is_refused_with_the_numbers"
    ),
    "data.source holds no text: all documents": (
        "unit/test_data_writing.py::test_too_little_text_is_refused_with_the_numbers"
    ),
    "Give more text, a larger validation_fraction": (
        "unit/test_data_writing.py::test_too_little_text_is_refused_with_the_numbers"
    ),
    "in the checkout, which has tested versions": (
        "unit/test_doctor.py::test_a_package_that_is_missing_or_too_old_is_named"
    ),
    "model.num_key_value_heads is": (
        "unit/test_model.py::test_sizes_that_do_not_go_together_are_refused"
    ),
    "cannot be read as JSON": "unit/test_model.py::test_a_folder_that_is_no_model_is_refused",
    "needs the package `transformers`": (
        "unit/test_model.py::test_without_transformers_the_extra_is_named"
    ),
    "Rank 0 failed to": (
        "ranks/test_run_checkpoints.py::test_a_run_is_not_gone_on_with_from_another_dataset"
    ),
    "); name a file in a folder that exists.": (
        "unit/test_plan_command.py::test_a_file_that_cannot_be_written_is_named"
    ),
    "Whoever looks at a run must be able": (
        "unit/test_run_commands.py::"
        "test_what_cannot_be_read_is_an_error_in_words_and_hides_no_other_run"
    ),
    "so no checkpoint was made of it; the newest": (
        "unit/test_saving.py::test_weights_that_are_not_finite_are_never_saved"
    ),
    "The training is done, but its result is not saved": (
        "ranks/test_run_checkpoints.py::"
        "test_a_failed_save_is_noted_and_the_next_one_works_and_a_failed_last_one_is_an_error"
    ),
    "schedule.kind is constant, cosine or wsd": (
        "unit/test_schedule.py::test_an_unknown_kind_is_refused"
    ),
    "lines wait in memory": (
        "unit/test_spool.py::test_a_full_disk_does_not_stop_the_training_and_loses_no_line"
    ),
    "before it (faults.max_skips)": (
        "ranks/test_faults.py::test_steps_are_skipped_only_so_often_one_after_another"
    ),
    "This run cannot be gone on with by this version": (
        "unit/test_store.py::test_a_format_that_is_not_read_stops_the_run_by_name_and_loses_nothing"
    ),
    "s for them (faults.node_wait_s).": "cluster/test_ray_job.py::"
    "test_too_few_cpus_in_the_cluster_are_refused_before_workers_start",
}
"""Words of the message, and the test that provokes it."""

_MACHINE = "a machine that is otherwise, such as one with GPUs, or with less memory"
_DISK = "a disk that fails in between"
_RACE = "something that ends in one moment of another thing"
_DEFECT = "a defect of ours or of a library"

OUT_OF_REACH = {
    "cannot be written: permission denied": "tests run as root too, who may write everything",
    "bytes of Python source and": "an interpreter without its library as files",
    "the plain state of modules has changed": _DEFECT,
    "it does not read back": _DISK,
    "interrupted by": _RACE,
    "tensors need a header of": "a hundred million bytes of names",
    "the ranks see different checkpoints there": _RACE,
    "another rank is gone, so nothing was written": _RACE,
    "make the mesh for the device the model trains on": _MACHINE,
    "the ranks could not make a gloo group": _MACHINE,
    "The undisturbed run": _DEFECT,
    "its manifest is larger than": "a manifest of more than a gigabyte",
    "cannot be found; install it beside": _DEFECT,
    "Ray Data returned passage": _DEFECT,
    "the run is not open": _DEFECT,
    "no worker has been heard of for": "half an hour of silence",
    "does not say that they trained": _DEFECT,
    "has no whole checkpoint left": _DISK,
    "no gloo": _MACHINE,
    "end other programs: Ray and two small workers": _MACHINE,
    "a driver, and torch": _MACHINE,
    "GPUs, and no NCCL": _MACHINE,
    "has no address (": _MACHINE,
    "there is no connection to Ray": _RACE,
    "the process that was connected to Ray": _RACE,
    "Ray did not answer within": _RACE,
    "ended with exit code": _DEFECT,
    "Another dmuon sweep is at work": _RACE,
    "does not say what came of its training": _DEFECT,
    "old checkpoints could not be deleted": _DISK,
    "without a checkpoint:": _DISK,
    "a lock does not keep others out": _MACHINE,
    "chmod 1777 /dev/shm as root": _MACHINE,
    "docker run --shm-size 2g": _MACHINE,
    "a rename does not replace": _MACHINE,
    "no locks (": _MACHINE,
    "it was never committed; the attempt": _RACE,
    "did not take the job": _RACE,
    "nothing tells MLflow about this run": _DISK,
    "MLflow will not show how this run ended": _DISK,
    "MLflow was not told everything": _DISK,
}
"""Words of the message, and what it would take to provoke it in a test."""
