"""What every rank does: train both contenders in turns and note the times."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.bench import decoder
from dmuon.bench.bound import product_seconds
from dmuon.bench.clock import Clock, Laps, clock_for
from dmuon.bench.contenders import DMUON, MAKERS, Contender, wire_dtype
from dmuon.bench.footprint import Footprint
from dmuon.bench.ranks import rank_device
from dmuon.bench.settings import Settings
from dmuon.bench.text import load_text, rows_of
from dmuon.newton_schulz import newton_schulz_flops

Round = dict[str, list[Laps]]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes that do not depend on the rank.

    Attributes:
        parameters: of the whole model.
        dedicated: how many of them have an owner.
        matrices: how many matrices those are.
        dedicated_bytes: theirs in the dtype they travel in.
        newton_schulz_per_flop: Newton-Schulz work of a step over that of forward and backward.
    """

    parameters: int
    dedicated: int
    matrices: int
    dedicated_bytes: int
    newton_schulz_per_flop: float


@dataclass(frozen=True)
class RankReport:
    """What one rank saw.

    Attributes:
        rounds: the laps of each step, by contender, a round.
        losses: mean over all ranks, one a step from the first, by contender.
        wire_bytes: payload of DMuon's collectives in the timed steps, by kind.
        newton_schulz: matrices orthogonalised here in the timed steps.
        product_seconds: of the matrix products of one step's Newton-Schulz here, see `bound`.
        peak_bytes: of the device's memory in training, by contender; None where nobody counts.
        facts: equal on every rank.
    """

    rounds: list[Round]
    losses: dict[str, list[float]]
    wire_bytes: dict[str, int]
    newton_schulz: int
    product_seconds: float
    peak_bytes: dict[str, int | None]
    facts: ModelFacts


def measure(rank: int, settings: Settings, device_type: str) -> RankReport:
    """Train both contenders, block by block in turns. Collective over all ranks."""
    device = rank_device(device_type, rank)
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    text = load_text(settings.sequence + 1)
    clock = clock_for(device)
    contenders, footprints = [], {}
    for make in MAKERS:
        footprint = Footprint(device)
        with footprint.building():
            contender = make(settings, mesh, device)
        contenders.append(contender)
        footprints[contender.name] = footprint
    muon = next(each for each in contenders if each.name == DMUON)
    facts = _facts(settings, muon)

    def block(contender: Contender, num_steps: int) -> list[Laps]:
        with footprints[contender.name].turn():
            return [
                _step(contender, _my_rows(text, settings, contender, device), clock, device)
                for _ in range(num_steps)
            ]

    for contender in contenders:
        block(contender, settings.warmup)
    counters = dmuon.get_counters(muon.model)
    bytes_before, newton_schulz_before = Counter(counters.bytes), counters.newton_schulz
    rounds = []
    for index in range(settings.repeats):  # the first of a round changes, so drift hits both alike
        order = contenders if index % 2 == 0 else contenders[::-1]
        rounds.append({each.name: block(each, settings.steps) for each in order})
    return RankReport(
        rounds=rounds,
        losses={each.name: _global_means(each.losses) for each in contenders},
        wire_bytes=dict(counters.bytes - bytes_before),
        newton_schulz=counters.newton_schulz - newton_schulz_before,
        product_seconds=product_seconds(_shapes(dmuon.get_owned_params(muon.model)), device),
        peak_bytes={name: footprint.peak for name, footprint in footprints.items()},
        facts=facts,
    )


def _step(contender: Contender, rows: torch.Tensor, clock: Clock, device: torch.device) -> Laps:
    """One whole training step, between barriers. Collective over all ranks."""
    _barrier(device)
    clock.mark()
    loss = contender.model(rows)
    clock.mark()
    loss.backward()
    clock.mark()
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    clock.mark()
    laps = clock.laps()
    _barrier(device)
    contender.losses.append(loss.detach())
    return laps


def _my_rows(
    text: torch.Tensor, settings: Settings, contender: Contender, device: torch.device
) -> torch.Tensor:
    """This rank's share of the next step's rows: the same for both contenders."""
    step = settings.seed + len(contender.losses)
    rows = rows_of(text, step, settings.batch, settings.sequence)
    return rows.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


def _global_means(losses: list[torch.Tensor]) -> list[float]:
    """Collective over all ranks."""
    means = torch.stack(losses).double()
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def _facts(settings: Settings, muon: Contender) -> ModelFacts:
    shapes = _shapes(dmuon.get_dedicated_params(muon.model))
    weights = sum(rows * columns for rows, columns in shapes)
    head = settings.width * decoder.VOCABULARY
    return ModelFacts(
        parameters=sum(param.numel() for param in decoder.build(settings).parameters()),
        dedicated=weights,
        matrices=len(shapes),
        dedicated_bytes=weights * wire_dtype(settings).itemsize,
        newton_schulz_per_flop=sum(newton_schulz_flops(*shape) for shape in shapes)
        / decoder.training_flops(settings, weights + head),
    )


def _shapes(params: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    return [(param.size(0), param.size(1)) for param in params.values()]
