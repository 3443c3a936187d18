"""What is measured: a frozen value that refuses what cannot run."""

from dataclasses import dataclass, fields

PRECISIONS = ("float32", "bfloat16")

ADAMW, DMUON, GATHER, ALLTOALL = "adamw", "dmuon", "gather", "alltoall"
MUON_FSDP2, TORCH_MUON = "muon_fsdp2", "torch_muon"
PUBLIC = (MUON_FSDP2, TORCH_MUON)  # by others
OTHER_MUONS = (GATHER, ALLTOALL, *PUBLIC)
ALONE = "alone"
CONTENDERS = (ADAMW, DMUON, *OTHER_MUONS, ALONE)

NUM_BYTES = 256  # what a token of the data can be


@dataclass(frozen=True)
class Settings:
    """One benchmark.

    Attributes:
        ranks: the numbers of ranks to run with, one after the other.
        contenders: who takes part; ``ADAMW``, the unit of all ratios, and ``DMUON`` always do.
        threads: of each rank; None: the cores, shared out.
        steps: steps in a block; the contenders alternate block by block.
        repeats: rounds, each one block of every contender.
        warmup: untimed steps of every contender before the first round; one more is counted.
        width: of the residual stream.
        layers: number of decoder blocks.
        heads: attention heads.
        intermediate: inner width of the feed-forward part.
        gated: three matrices in the feed-forward part (SwiGLU), or two (GELU).
        vocabulary: rows of the embedding and of the head; the data are bytes, the first 256.
        sequence: tokens a sequence.
        batch: sequences a step over all ranks, so that every number of ranks does the same work.
        weak: ``batch`` is of each rank, so that the work grows with the ranks.
        precision: dtype of forward and backward; master weights are float32.
        ns_dtype: dtype of Newton-Schulz, of all Muons but public ones, which have bfloat16; None:
            DMuon's default for the device.
        reshard: free the weights between forward and backward (``reshard_after_forward``).
        seed: of weights and data.
        timeout_s: of every collective, in seconds.
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    contenders: tuple[str, ...] = (ADAMW, DMUON)
    threads: int | None = None
    steps: int = 1
    repeats: int = 7
    warmup: int = 1
    width: int = 256
    layers: int = 12
    heads: int = 4
    intermediate: int = 704
    gated: bool = True
    vocabulary: int = NUM_BYTES
    sequence: int = 128
    batch: int = 16
    weak: bool = False
    precision: str = "float32"
    ns_dtype: str | None = None
    reshard: bool = True
    seed: int = 0
    timeout_s: int = 300

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_contenders()
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"--ranks names a number twice: {_listed(self.ranks)}")
        uneven = [ranks for ranks in self.ranks if self.batch_over(ranks) % ranks]
        if uneven:
            raise ValueError(
                f"--batch {self.batch} sequences cannot be split over {uneven[0]} ranks; give a "
                f"multiple of each of {_listed(self.ranks)}, or --weak"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} must be a multiple of twice --heads {self.heads}, so that "
                "every head has an even width (rotary embeddings turn pairs)"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision is one of {', '.join(PRECISIONS)}, got {self.precision}")
        if self.ns_dtype not in (None, *PRECISIONS):
            raise ValueError(f"--ns-dtype is one of {', '.join(PRECISIONS)}, got {self.ns_dtype}")

    def _check_counts(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"--ranks takes numbers of at least 1, got {_listed(self.ranks)!r}")
        least = {"warmup": 0, "seed": 0, "vocabulary": NUM_BYTES}
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < least.get(field.name, 1):
                option = field.name.removesuffix("_s")
                raise ValueError(
                    f"--{option} must be at least {least.get(field.name, 1)}, got {value}"
                )

    def _check_contenders(self) -> None:
        given = ",".join(self.contenders)
        unknown = [name for name in self.contenders if name not in CONTENDERS]
        if unknown:
            raise ValueError(
                f"--contenders {given}: there is no {unknown[0]!r}, only {', '.join(CONTENDERS)}"
            )
        if len(set(self.contenders)) != len(self.contenders):
            raise ValueError(f"--contenders names one twice: {given}")
        if not {ADAMW, DMUON} <= set(self.contenders):
            raise ValueError(
                f"--contenders {given}: {ADAMW} (the unit of all ratios) and {DMUON} always take "
                "part; name them too"
            )

    def batch_over(self, num_ranks: int) -> int:
        """Sequences a step over all of ``num_ranks`` ranks."""
        return self.batch * num_ranks if self.weak else self.batch

    def tokens_over(self, num_ranks: int) -> int:
        """Tokens a step over all of ``num_ranks`` ranks."""
        return self.batch_over(num_ranks) * self.sequence


def _listed(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))
