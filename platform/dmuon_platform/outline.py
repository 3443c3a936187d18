"""What a job will do, in a few lines, worked out without starting anything."""

import dmuon
from dmuon_platform import preflight
from dmuon_platform.assembly import muon_takes
from dmuon_platform.data import check_size, load_tokenizer, measure_data
from dmuon_platform.model import build_model, layer_modules
from dmuon_platform.origin import start_of
from dmuon_platform.run_folder import DATA_FOLDER
from dmuon_platform.spec import JobSpec


def outline(spec: JobSpec) -> str:
    """Check the job against this machine and return its plan as text.

    Raises:
        SpecError: The model cannot be built, or the data is not there or does not fit it.
    """
    spec = preflight.resolve(spec)
    start = start_of(spec, spec.run_dir.parent / DATA_FOLDER)
    preflight.check_job(start.spec, has_text=start.dataset is None, begins=start.begins)
    preflight.check_earlier_run(spec)
    spec = start.spec
    info = start.dataset or measure_data(spec.data)
    if info is not None:
        check_size(info, spec.train.global_batch_size)
    num_tokens = spec.num_steps * spec.tokens_per_step
    model = build_model(spec.model, spec.data.sequence_length, device="meta")
    num_ids = load_tokenizer(spec.data.tokenizer).vocab_size
    lines = [
        f"{spec.name}: in {spec.run_dir}",
        f"{spec.num_steps:,} steps of {spec.tokens_per_step:,} tokens, {num_tokens:,} in all",
        f"{sum(param.numel() for param in model.parameters()):,} parameters",
        f"tokenizer: {spec.data.tokenizer}, {num_ids:,} tokens",
        "text: more than is counted here; whether it fills a batch is seen when the job runs"
        if info is None
        else f"text: {info.num_train_sequences:,} samples an epoch, "
        f"{info.num_validation_sequences:,} held out",
    ]
    for num_workers in spec.fitting_workers:
        lines += [_division(spec, num_workers), _ownership(owner_plan(spec, num_workers))]
    return "\n".join(lines)


def owner_plan(spec: JobSpec, num_workers: int) -> dmuon.Plan:
    """Return who will own which hidden matrix among that many workers."""
    model = build_model(spec.model, spec.data.sequence_length, device="meta")
    layers, takes = set(layer_modules(model)), muon_takes(spec)
    blocks = [name for name, module in model.named_modules() if module in layers]
    matrices = [
        dmuon.Matrix(
            name,
            tuple(param.shape),
            block=next((block for block in blocks if name.startswith(f"{block}.")), ""),
        )
        for name, param in model.named_parameters()
        if takes is not None and takes(name, param)
    ]
    return dmuon.make_plan(matrices, num_workers)


def _division(spec: JobSpec, num_workers: int) -> str:
    replicate, shard = spec.resolve_mesh(num_workers)
    num_micro = spec.accumulation(num_workers)
    return (
        f"{num_workers} workers: mesh {replicate} x {shard} (replicate x shard), each worker "
        f"{num_micro} x {spec.train.micro_batch_size} sequences a step"
    )


def _ownership(plan: dmuon.Plan) -> str:
    if not plan.matrices:
        return "  AdamW trains all parameters; none has an owner"
    least, most = (size / 2**20 for size in (min(plan.bytes_per_owner), max(plan.bytes_per_owner)))
    return (
        f"  {len(plan.matrices)} hidden matrices over {plan.num_owners} owners: {least:.1f} to "
        f"{most:.1f} MiB of weights and momentum each, busiest owner {plan.imbalance:.3f} x the "
        "mean work"
    )
