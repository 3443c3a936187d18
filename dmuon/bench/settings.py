"""What is measured: a frozen value that refuses what cannot run."""

from dataclasses import dataclass, fields

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """One benchmark.

    Attributes:
        ranks: the numbers of ranks to run with, one after the other.
        steps: steps in a block; the contenders alternate block by block.
        repeats: rounds, each one block of either contender.
        warmup: untimed steps of either contender before the first round.
        width: of the residual stream.
        layers: number of decoder blocks.
        heads: attention heads.
        intermediate: inner width of the feed-forward part.
        sequence: tokens a sequence.
        batch: sequences a step over all ranks, so that every number of ranks does the same work.
        precision: dtype of forward and backward; master weights are float32.
        reshard: free the weights between forward and backward (``reshard_after_forward``).
        seed: of weights and data.
        timeout_s: of every collective, in seconds.
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    steps: int = 1
    repeats: int = 7
    warmup: int = 1
    width: int = 256
    layers: int = 12
    heads: int = 4
    intermediate: int = 704
    sequence: int = 128
    batch: int = 16
    precision: str = "float32"
    reshard: bool = True
    seed: int = 0
    timeout_s: int = 300

    def __post_init__(self) -> None:
        self._check_counts()
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"--ranks names a number twice: {_listed(self.ranks)}")
        uneven = [ranks for ranks in self.ranks if self.batch % ranks]
        if uneven:
            raise ValueError(
                f"--batch {self.batch} sequences cannot be split over {uneven[0]} ranks; give a "
                f"multiple of each of {_listed(self.ranks)}"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} must be a multiple of twice --heads {self.heads}, so that "
                "every head has an even width (rotary embeddings turn pairs)"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision is one of {', '.join(PRECISIONS)}, got {self.precision}")

    def _check_counts(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"--ranks takes numbers of at least 1, got {_listed(self.ranks)!r}")
        least = {"warmup": 0, "seed": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < least.get(field.name, 1):
                option = field.name.removesuffix("_s")
                raise ValueError(
                    f"--{option} must be at least {least.get(field.name, 1)}, got {value}"
                )

    @property
    def tokens(self) -> int:
        """Tokens a step over all ranks."""
        return self.batch * self.sequence


def _listed(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))
