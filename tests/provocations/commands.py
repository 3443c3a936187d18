"""Mistakes with the command ``dmuon``, in a folder that `prepare` has made."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_RELEASE = ROOT / "tests" / "first_release" / "checkpoint"

FILES = {
    "cut.toml": b"x = [",
    "cut.yaml": b"a: [b",
    "twice.json": b'{"a": 1, "a": 2}',
    "latin.toml": b"\xff",
    "list.json": b"[]",
    "job.txt": b"",
    "file": b"",
    "runs/torn/job.toml": b"x",
    "runs/torn/checkpoints/x": b"",
}

ROWS: list[tuple[str, int, tuple[str, ...]]] = [
    # a job file
    ("validate no.toml", 78, ("no.toml: there is no such file", "did you mean job.toml?")),
    ("validate no/job.toml", 78, ("the folder no does not exist either",)),
    ("validate cut.toml", 78, ("cut.toml: is not TOML that can be read",)),
    (
        "validate cut.yaml",
        78,
        ("cut.yaml: is not YAML", "expected ',' or ']'", "at line 1, column 6"),
    ),
    ("validate twice.json", 78, ("twice.json", "the key 'a' is there twice in one table")),
    ("validate latin.toml", 78, ("latin.toml: is not UTF-8 text (byte 0); save it as that",)),
    ("validate runs", 78, ("runs: cannot be read (Is a directory); name a job file",)),
    (
        "validate list.json",
        78,
        ("a job is a table of sections, not list", "see jobs/tiny_cpu.toml"),
    ),
    ("validate job.txt", 78, ("a job file ends in one of .toml", "rename it, or convert it")),
    ("validate job.toml --set name", 78, ("--set name: must be section.key=value", "write for")),
    (
        "validate job.toml --set name.x=3",
        78,
        ("name is 'tiny_cpu' and not a table", "to replace it"),
    ),
    (
        "validate job.toml --set data.source=file",
        78,
        ("'file' holds no text: all files are empty.",),
    ),
    (
        "validate job.toml --set data.source=no/*",
        78,
        ("no file matches 'no/*'", "Name existing text"),
    ),
    ("validate job.toml --set data.source=runs", 78, ("matches only folders", "'runs/*.txt'")),
    (
        "validate job.toml --set resources.workers={min=3,max=2}",
        78,
        ("resources.workers: min = 3 must not be above max = 2", "write {min = 2, max = 3}"),
    ),
    (
        'validate job.toml --set \'faults.inject=[{kind="kill_controller",step=1,rank="all"}]\'',
        78,
        ("faults.inject.rank", 'happens once, not on "all"', "write rank = 0"),
    ),
    (
        "validate job.toml --set 'faults.inject=[{kind=\"kill\",step=1,seconds=2.0}]'",
        78,
        ("seconds: is for slow and stall, not for kill",),
    ),
    # a cluster, and where runs are
    (
        "run job.toml --address ray://head:10001",
        78,
        (
            "--address sets resources.address: ",
            "'ray://head:10001' is not 'host:port'",
            "use dmuon submit",
        ),
    ),
    (
        "run job.toml --address 127.0.0.1:1",
        69,
        (
            "No Ray cluster answers at resources.address = '127.0.0.1:1'",
            "Start one with `ray start --head",
        ),
    ),
    (
        f"run job.toml --address {'x' * 70}:6379",
        69,
        ("No Ray cluster answers at", "no machine has such an address", "correct the address"),
    ),
    (
        "submit job.toml --address http://127.0.0.1:1 --set storage=~nosuchuser/x",
        78,
        ("--set storage: must be a folder, and no user here has that name", "from / on"),
    ),
    ("status x --storage ~nosuchuser/x", 66, ("There is no run 'x'", "~nosuchuser")),
    (
        "run job.toml --set storage=file",
        1,
        ("cannot be written (Not a directory)", "must be a folder", "--set storage=PATH"),
    ),
    (
        "submit job.toml --address ray://head:10001",
        69,
        (
            "No Ray job server can be at --address ray://head",
            "begins with http://",
            "http://HOST:8265",
        ),
    ),
    ("submit job.toml", 2, ("required: --address",)),
    (
        "submit job.toml --address http://127.0.0.1:1 --set tracking.uri=http://me:s3cret@far",
        78,
        ("--set tracking.uri=http://far", "would show its password"),
    ),
    (
        "resume x --address http://127.0.0.1:1 --set tracking.uri=http://me:s3cret@far",
        78,
        ("Write it in the job file, or put",),
    ),
    ("resume x --address http://127.0.0.1:1", 78, ("--storage runs must be the absolute path",)),
    # runs
    ("status .", 66, ("There is no run", "--storage names another")),  # where job.toml is a user's
    ("validate job.toml --set model.num_hidden_layers=1000000", 78, ("must be at most 1000",)),
    ("validate job.toml --set model.hidden_size=10000000000", 78, ("must be at most 1e+09",)),
    ("validate job.toml --set model.num_attention_heads=10000000", 78, ("must be at most 100000",)),
    ("status no", 66, ("There is no run 'no' in", "It has torn.", "--storage names another")),
    (
        "status no --storage file",
        1,
        ("cannot be read (Not a directory)", "names the folder of all runs"),
    ),
    ("status no --every x", 2, ("argument --every: must be a number, not 'x'",)),
    ("status no --every 0", 2, ("argument --every: must be a number of seconds above 0, not '0'",)),
    ("resume torn", 78, ("is not TOML", "what an earlier launch has recorded")),
    # plan, init
    ("plan job.toml --workers x", 2, ("argument --workers: must be a whole number, not 'x'",)),
    (
        "plan job.toml --workers 3",
        78,
        ("16 sequences do not divide into 3 workers", "good values: 24"),
    ),
    (
        "plan job.toml --gpu h9",
        78,
        ("The cluster of this plan: there is no GPU 'h9'", "choose one of"),
    ),
    ("plan job.toml --intra 1GB/s", 78, ("--intra tells how fast a cluster is", "add --gpu h100")),
    ("plan job.toml --gpu h100 --intra 1", 78, ("--intra '1' is no rate above zero", "450GB/s")),
    ("plan job.toml --json no/x", 1, ("--json no/x cannot be written", "in a folder that exists")),
    ("init job.toml", 78, ("job.toml is there already", "give another file, or move it away")),
    ("init new.txt", 78, ("new.txt does not end in .toml", "TOML is written", "rename it")),
    ("init no/new.toml", 78, ("cannot be written: there is no folder no",)),
    ("init new.toml --data runs", 78, ("No file matches --data 'runs'", "or globs such as")),
    ("init new.toml --data job.toml runs", 78, ("No file matches --data 'runs'",)),
    ("sweep job.toml --grid a=1 --seeds 0 --seeds 1", 2, ("--seeds: is given twice; write one",)),
    ("bench-recovery job.toml --kinds kill --kinds stall", 2, ("--kinds: is given twice",)),
    ("validate job.toml other.toml", 2, ("usage: dmuon validate", "arguments: other.toml")),
    ("checkpoint show a b", 2, ("usage: dmuon checkpoint show", "arguments: b")),
    (
        "init new.toml --tokenizer no",
        78,
        ("There is no tokenizer 'no'", "a model's tokenizer.json"),
    ),
    ("init new.toml --workers 0", 2, ("--workers: must be a whole number of at least 1, not '0'",)),
    # checkpoints
    ("checkpoint list no", 2, ("no: there is no such folder", "that checkpoints were saved in")),
    (
        "checkpoint list runs",
        2,
        ("runs is the folder of all runs", "name that of one: runs/torn"),
    ),
    ("checkpoint list saved", 2, ("it is itself a checkpoint", "give the folder around it: .")),
    ("checkpoint show runs", 1, ("runs is not a whole checkpoint", "it is none, or writing")),
    (
        "checkpoint verify runs/torn",
        2,
        ("runs/torn is the folder of a run", "which this lists: dmuon checkpoint list runs/torn"),
    ),
    ("checkpoint show file", 2, ("file: it is no folder; give the folder of a checkpoint",)),
    ('checkpoint show ""', 2, ("the path of a checkpoint must be text", "and not empty, got ''")),
    ("checkpoint export saved file", 2, ("file: it is there already; nothing is overwritten",)),
    (
        "checkpoint export saved out.txt",
        2,
        ("nothing is written as .txt", "for a folder leave the ending out"),
    ),
    ("checkpoint export saved file/x", 1, ("export failed at", "name folders that you can use")),
    ("checkpoint export saved x --max-shard-mib 0", 2, ("must be a whole number of at least 1",)),
    ("checkpoint copy runs new", 2, ("runs: it has no manifest.json", "give one that is")),
    ("checkpoint copy saved saved", 2, ("a checkpoint is there already", "give another target")),
    ("checkpoint copy saved file/x", 1, ("copy failed at", "name folders that you can use")),
    (
        "checkpoint copy s3:// new",
        2,
        ("'s3://': names no folder", "a URL such as s3://bucket/folder"),
    ),
    ("checkpoint copy saved no://x", 2, ("no://x: cannot be reached", "Known are paths, file://")),
    (
        "checkpoint diff saved no",
        2,
        ("no: there is no such file or folder", "give a checkpoint, or"),
    ),
    (
        "checkpoint diff saved file",
        2,
        ("neither a folder nor a file ending in", "give one of these"),
    ),
    # sweeps
    (
        "sweep job.toml --grid optimizer.lr=0.1 --output file",
        1,
        ("The folder of the sweep, file, cannot be made (File exists)", "--output names one"),
    ),
    # faults on purpose
    ("bench-recovery job.toml --kinds x", 78, ("--kinds x: x is none; write one or more of kill",)),
    (
        "bench-recovery job.toml --set train.steps=2 schedule.warmup_steps=0",
        78,
        ("train.steps: 2 are too few for this; write 10 or more",),
    ),
    (
        "bench-recovery job.toml --set storage=. name=old",
        78,
        ("is there from an earlier benchmark", "Delete it, or choose another name"),
    ),
    (
        "chaos job.toml --set storage=. name=old",
        78,
        ("old-chaos-0-1 is there from an earlier chaos", "Delete it, or give another --seed"),
    ),
    (
        "chaos job.toml --set storage=file",
        1,
        ("tiny_cpu-undisturbed cannot be written (Not a directory)",),
    ),
    ("chaos job.toml --set data.source=no/*", 78, ("no file matches 'no/*'",)),
    ("bench-recovery job.toml --set data.source=no/*", 78, ("no file matches 'no/*'",)),
    (
        "bench-recovery job.toml --set resources.address=127.0.0.1:1",
        69,
        ("No Ray cluster answers at resources.address = '127.0.0.1:1'",),
    ),
    ("chaos job.toml --minutes x", 2, ("argument --minutes: must be a number, not 'x'",)),
    (
        "sweep job.toml --grid x",
        78,
        ("--grid x: must be section.key=VALUE,VALUE", "write for example"),
    ),
    ("sweep job.toml --grid a.b=1,1", 78, ("a key or a value is there twice; once is it",)),
    ("sweep job.toml --grid train.seed=1", 78, ("train.seed is the sweep's; seeds are --seeds",)),
    (
        "sweep job.toml --grid optimizer.lr=0.1 --grid optimizer.lr=0.1",
        78,
        ("the grids have optimizer.lr=0.1 twice", "take one of them out"),
    ),
    ("sweep job.toml --grid x --seeds 1,1", 2, ("--seeds: must be different numbers, not '1,1'",)),
    ("sweep job.toml --grid x --seeds x", 2, ("--seeds: must be a whole number, not 'x'",)),
    # the machine
    (
        "doctor --storage file",
        1,
        ("storage: give a folder that this user and all workers can write",),
    ),
    (
        "doctor --storage . --address head",
        1,
        ("'head' is no address", "give host:port of the head"),
    ),
    (
        "doctor --storage . --address 127.0.0.1:1",
        1,
        ("nothing answers at 127.0.0.1:1", "start it with"),
    ),
    (
        "doctor --storage . --address http://127.0.0.1:1",
        1,
        ("none at http://127.0.0.1:1", "or correct the address"),
    ),
    (
        "doctor --storage . --tracking-uri http://127.0.0.1:1",
        0,
        ("no server at http://127.0.0.1:1", "start it with `mlflow server`"),
    ),
    (
        "doctor --storage . --tracking-uri no://x",
        0,
        ("'no://x' is no tracking URI of MLflow's own", "give http://HOST:5000"),
    ),
]
"""The arguments, the exit code, and words of the message."""


def prepare(folder: Path) -> None:
    """Make the files that the rows speak of."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name in ("old-recovery", "old-chaos-0-1"):
        (folder / name).mkdir()
    shutil.copy(ROOT / "jobs" / "tiny_cpu.toml", folder / "job.toml")
    shutil.copytree(FIRST_RELEASE, folder / "saved")
