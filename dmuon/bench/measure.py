"""What every rank does: train all contenders in turns and note the times."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.bench import decoder, parity
from dmuon.bench.bound import product_seconds
from dmuon.bench.contenders import Contender, make, newton_schulz_dtype, wire_dtype
from dmuon.bench.footprint import Footprint, footprint_on
from dmuon.bench.ranks import num_cores, rank_device
from dmuon.bench.settings import DMUON, OTHER_MUONS, Settings
from dmuon.bench.track import Track, Turn
from dmuon.newton_schulz import newton_schulz_flops

Round = dict[str, Turn]


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
        rounds: the turn of each contender, a round.
        losses: mean over all ranks, one a step from the first, by contender.
        payload: bytes handed to collectives in one step, by contender and kind.
        wire_bytes: what DMuon itself counts in the timed steps, by kind.
        newton_schulz: matrices orthogonalised here by DMuon in the timed steps.
        product_seconds: of the matrix products of one step's Newton-Schulz here, see `bound`.
        peak_bytes: of memory in training, by contender.
        differences: of the weights of other Muons from DMuon's, on rank 0, see `parity`.
        facts: equal on every rank.
    """

    rounds: list[Round]
    losses: dict[str, list[float]]
    payload: dict[str, dict[str, int]]
    wire_bytes: dict[str, int]
    newton_schulz: int
    product_seconds: float
    peak_bytes: dict[str, int]
    differences: dict[str, float]
    facts: ModelFacts


def measure(rank: int, settings: Settings, device_type: str) -> RankReport:
    """Train all contenders, block by block in turns. Collective over all ranks."""
    device = rank_device(device_type, rank)
    contenders, footprints = _line_up(settings, device)
    track = Track(settings, device)
    payload = {}
    for contender in contenders:
        with footprints[contender.name].turn(is_timed=False):
            track.turn(contender, settings.warmup)
            payload[contender.name] = track.payload(contender)
    muon = next(each for each in contenders if each.name == DMUON)
    others = [each for each in contenders if each.name in OTHER_MUONS]
    differences = parity.differences(muon, others, settings) if others else {}
    counters = dmuon.get_counters(muon.model)
    bytes_before, newton_schulz_before = Counter(counters.bytes), counters.newton_schulz
    rounds: list[Round] = []
    for index in range(settings.repeats):
        rounds.append({})
        for contender in _rotated(contenders, index):
            with footprints[contender.name].turn(is_timed=True):
                rounds[-1][contender.name] = track.turn(contender, settings.steps)
    return RankReport(
        rounds=rounds,
        losses={each.name: _global_means(each.losses) for each in contenders},
        payload=payload,
        wire_bytes=dict(counters.bytes - bytes_before),
        newton_schulz=counters.newton_schulz - newton_schulz_before,
        product_seconds=product_seconds(
            _shapes(dmuon.get_owned_params(muon.model)),
            device,
            newton_schulz_dtype(settings, device),
            _crowding(),
        ),
        peak_bytes={name: footprint.peak for name, footprint in footprints.items()},
        differences=differences,
        facts=_facts(settings, muon),
    )


def _line_up(
    settings: Settings, device: torch.device
) -> tuple[list[Contender], dict[str, Footprint]]:
    """All contenders in one process group. Collective over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    contenders, footprints = [], {}
    for name in settings.contenders:
        footprints[name] = footprint_on(device)
        with footprints[name].building():
            contenders.append(make(name, settings, mesh, device))
    return contenders, footprints


def _rotated(contenders: list[Contender], index: int) -> list[Contender]:
    """The first of a round changes, so that drift hits all alike."""
    first = index % len(contenders)
    return contenders[first:] + contenders[:first]


def _crowding() -> float:
    """Threads of all ranks over the cores of this machine."""
    return max(1.0, dist.get_world_size() * torch.get_num_threads() / num_cores())


def _global_means(losses: list[torch.Tensor]) -> list[float]:
    """Collective over all ranks."""
    means = torch.stack(losses).double()
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def _facts(settings: Settings, muon: Contender) -> ModelFacts:
    shapes = _shapes(dmuon.get_dedicated_params(muon.model))
    weights = sum(rows * columns for rows, columns in shapes)
    head = settings.width * settings.vocabulary
    flops = decoder.training_flops(
        settings, weights + head, settings.tokens_over(dist.get_world_size())
    )
    with torch.device("meta"):
        parameters = sum(param.numel() for param in decoder.build(settings).parameters())
    return ModelFacts(
        parameters=parameters,
        dedicated=weights,
        matrices=len(shapes),
        dedicated_bytes=weights * wire_dtype(settings).itemsize,
        newton_schulz_per_flop=sum(newton_schulz_flops(*shape) for shape in shapes) / flops,
    )


def _shapes(params: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    return [(param.size(0), param.size(1)) for param in params.values()]
