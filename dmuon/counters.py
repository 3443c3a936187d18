"""What really happened, counted where it happens: the proof that Muon ran."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Cheap host-side counts since the model was dedicated, of this rank alone.

    Attributes:
        newton_schulz: matrices orthogonalised here.
        steps: optimizer steps.
        reductions: gradient reductions launched, one a block and backward.
        collectives: how many of each kind were called for dedicated parameters
            "broadcast" (unshard), "reduce" or "all_to_all" (gradients, by backend), "all_gather"
            and "reduce_scatter" (both, of blocks that travel whole), "publish" (new weights to
            other replicas), "all_reduce" (norms), "agreement" (call order).
        bytes: payload handed to each kind, in bytes.
    """

    newton_schulz: int = 0
    steps: int = 0
    reductions: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, num_bytes: int) -> None:
        """Note one collective of ``kind`` carrying ``num_bytes``."""
        self.collectives[kind] += 1
        self.bytes[kind] += num_bytes
