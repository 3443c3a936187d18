"""Who reads what a run prints may leave."""

import subprocess
import sys
from pathlib import Path

RUN = """
import sys
from pathlib import Path
from dmuon_platform.output import standard_output
from rich.console import Console
console = Console(file=standard_output())
for step in range(20_000):
    console.print(f"step {step}", soft_wrap=True)
Path(sys.argv[1]).touch()
"""


def test_a_run_goes_on_when_the_reader_of_its_output_leaves(tmp_path: Path) -> None:
    end = tmp_path / "end"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, end], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "step 0\n"
    run.stdout.close()
    assert run.stderr is not None
    said = run.stderr.read()
    assert run.wait(60) == 0, said
    assert said == "dmuon: nobody reads the output any more; the run goes on\n"
    assert end.exists()
