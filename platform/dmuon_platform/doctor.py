"""``dmuon doctor``: is everything here that a training needs? Each problem comes with its fix."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from dmuon_platform.finding import Finding, State
from dmuon_platform.machine_checks import check_machine
from dmuon_platform.service_checks import check_mlflow, check_ray
from dmuon_platform.spec.user_path import user_path
from dmuon_platform.storage_checks import check_shared_memory, check_storage
from dmuon_platform.text_table import text_table

FAILED = 1
"""Exit code when something would keep a training from running."""


def run(arguments: argparse.Namespace) -> int:
    """Look at everything and print it; return 0 when nothing is broken."""
    storage = user_path(arguments.storage).absolute()
    findings = list(examine(storage, arguments.address, arguments.tracking_uri))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(shown(findings))
    return FAILED if any(finding.state is State.BROKEN for finding in findings) else 0


def examine(storage: Path, address: str | None, tracking_uri: str | None) -> Iterator[Finding]:
    """Yield what is found, from the machine itself to what it must reach.

    Args:
        storage: The folder of all runs.
        address: Of a Ray cluster, ``host:port`` or ``http://host:port`` of its job server; None:
            the jobs start one of their own.
        tracking_uri: Of MLflow; None: a database in ``storage``.
    """
    yield from check_machine()
    yield check_shared_memory()
    yield from check_storage(storage)
    yield from check_ray(address)
    yield check_mlflow(tracking_uri, storage)


def shown(findings: Sequence[Finding]) -> str:
    """Return a table for people, and below it what to do."""
    rows = [(finding.state.value, finding.about, finding.seen) for finding in findings]
    fixes = [f"{f.about}: {f.fix}" for f in findings if f.fix]
    num_broken = sum(finding.state is State.BROKEN for finding in findings)
    verdict = f"{num_broken} to be mended before a training can run." if num_broken else "All well."
    if fixes and not num_broken:
        verdict = "A training can run; these would do it good."
    return "\n".join([text_table(("", "what", "found"), rows), "", verdict, *fixes])
