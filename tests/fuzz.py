"""Run random cases against the one-process answer, for as long as you like.

    python tests/fuzz.py --minutes 30 --first-seed 1000
    python tests/fuzz.py --ranks 4 --only 1234

Each seed that fails is printed with what differs; put it into `FAILED_ONCE` of
`tests/ranks/test_fuzz.py` when it is mended.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "ranks")]

from fuzz_case import Case, check  # noqa: E402
from ranks_runner import run_ranks  # noqa: E402

SEEDS_AT_ONCE = 20


def run_seeds(world_size: int, seeds: Iterable[int]) -> None:
    """Check the cases of ``seeds`` on ``world_size`` forked gloo ranks.

    Raises:
        AssertionError: with the seed, the case and what differs.
    """

    def body(rank: int) -> None:
        for seed in seeds:
            case = Case.draw(seed, world_size)
            try:
                check(case)
            except BaseException as error:
                where = traceback.format_exc(limit=-4)
                raise AssertionError(
                    f"seed {seed}, {world_size} ranks: {error}\n{case}\n{where}"
                ) from None

    run_ranks(world_size, body, timeout_s=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 3, 4), action="append")
    parser.add_argument("--only", type=int, help="run this one seed and stop")
    given = parser.parse_args()
    end = time.monotonic() + given.minutes * 60
    failed, seed = [], given.first_seed
    while True:
        seeds = range(seed, seed + SEEDS_AT_ONCE) if given.only is None else [given.only]
        for world_size in given.ranks or (1, 2, 3, 4):
            failed += _failing(world_size, list(seeds))
        seed += SEEDS_AT_ONCE
        print(f"seeds below {seed} done, {len(failed)} failed: {failed}", flush=True)
        if given.only is not None or time.monotonic() > end:
            return 1 if failed else 0


def _failing(world_size: int, seeds: list[int]) -> list[tuple[int, int]]:
    """The seeds that fail, found one by one when one of them does."""
    try:
        run_seeds(world_size, seeds)
    except (AssertionError, TimeoutError) as error:
        if len(seeds) > 1:
            return [each for seed in seeds for each in _failing(world_size, [seed])]
        print(str(error), flush=True)
        return [(world_size, seeds[0])]
    return []


if __name__ == "__main__":
    sys.exit(main())
