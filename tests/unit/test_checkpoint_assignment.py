"""Who writes what: everything once, owners respected, evenly, and the same on every rank."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmuon.checkpoint.assignment import SECTIONS, Assignment, Item, assign, section_of
from dmuon.errors import SetupError


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Item], int]:
    num_writers = draw(st.integers(1, 6))
    owners = st.none() | st.integers(0, num_writers - 1)
    names = st.lists(st.tuples(st.sampled_from(SECTIONS), st.text(max_size=3)), unique=True)
    sizes = st.integers(0, 5) | st.integers(0, 1000)
    return [
        Item(name, section, draw(sizes), draw(owners)) for section, name in draw(names)
    ], num_writers


@given(problems())
def test_everything_is_written_once_and_by_its_owner(problem):
    items, num_writers = problem
    plan = assign(items, num_writers)
    written = [
        (section, name)
        for section in SECTIONS
        for writer in range(num_writers)
        for name in plan.names_of(section, writer)
    ]
    assert sorted(written) == sorted((item.section, item.name) for item in items)
    for item in items:
        if item.owner is not None:
            assert plan.writer(item.section, item.name) == item.owner


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_items_does_not_matter(problem, rng: random.Random):
    items, num_writers = problem
    plan = assign(items, num_writers)
    shuffled = assign(rng.sample(items, len(items)), num_writers)
    assert plan == shuffled
    assert list(plan.writers) == list(shuffled.writers)
    assert list(plan.files.items()) == list(shuffled.files.items())


def bytes_by_writer(items: list[Item], plan: Assignment) -> list[int]:
    loads = [0] * len(plan.num_bytes)
    for item in items:
        loads[plan.writer(item.section, item.name)] += item.num_bytes
    return loads


@given(problems())
def test_what_has_no_owner_goes_where_the_fewest_bytes_are(problem):
    items, num_writers = problem
    plan = assign(items, num_writers)
    loads = bytes_by_writer(items, plan)
    assert list(plan.num_bytes) == loads
    fixed = [0] * num_writers
    for item in items:
        fixed[item.owner or 0] += item.num_bytes if item.owner is not None else 0
    free = [item.num_bytes for item in items if item.owner is None]
    mean = sum(loads) / num_writers
    for writer, load in enumerate(loads):
        # the last one that it got found it with no more than the mean of all the others
        assert load <= max(fixed[writer], mean + max(free, default=0) * (1 - 1 / num_writers))


def test_the_largest_go_first_so_that_small_ones_fill_up():
    items = [Item(f"{number}", "optim", size) for number, size in enumerate([1, 1, 2, 3, 1])]
    assert assign(items, 2).num_bytes == (4, 4)


def decoder(num_layers: int, width: int, vocab: int, num_writers: int, owned: bool) -> list[Item]:
    """Weights, momenta and moments of a decoder; matrices owned in turn."""
    shapes = {"q": (width, width), "k": (width // 4, width), "v": (width // 4, width)}
    shapes |= {"o": (width, width), "norm": (width,)}
    shapes |= {"up": (3 * width, width), "gate": (3 * width, width), "down": (width, 3 * width)}
    items = []
    all_shapes = {f"{layer}.{name}": s for layer in range(num_layers) for name, s in shapes.items()}
    all_shapes |= {"embed": (vocab, width), "head": (vocab, width), "norm": (width,)}
    for number, (name, shape) in enumerate(all_shapes.items()):
        num_bytes = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        is_hidden = len(shape) > 1 and name not in ("embed", "head")
        owner = number % num_writers if is_hidden and owned else None
        items.append(Item(name, "model", num_bytes, owner))
        for part in ("momentum_buffer",) if is_hidden else ("exp_avg", "exp_avg_sq"):
            items.append(Item(f"{part}/{name}", "optim", num_bytes, owner))
    return items


@pytest.mark.parametrize("num_writers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("size", [(24, 1024, 32000), (32, 4096, 128256)])
def test_writers_of_a_decoder_have_at_most_15_percent_more_than_the_mean(num_writers, owned, size):
    items = decoder(*size, num_writers, owned)
    plan = assign(items, num_writers)
    fixed = [0] * num_writers
    for item in items:
        if item.owner is not None:
            fixed[item.owner] += item.num_bytes
    mean = sum(plan.num_bytes) / num_writers
    assert max(plan.num_bytes) <= max(1.15 * mean, *fixed)


@given(problems())
def test_files_are_numbered_without_gaps_and_only_where_there_is_something(problem):
    items, num_writers = problem
    plan = assign(items, num_writers)
    for section in SECTIONS:
        files = [file for (its, _), file in plan.files.items() if its == section]
        busy = [writer for writer in range(num_writers) if plan.names_of(section, writer)]
        assert [writer for its, writer in plan.files if its == section] == busy
        if section == "model" and len(busy) == 1:
            assert files == ["model.safetensors"]
        else:
            count = len(busy)
            assert files == [
                f"{section}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
            ]
        for file in files:
            assert section_of(file) == section
        for writer in busy:
            for name in plan.names_of(section, writer):
                assert plan.file(section, name) == plan.files[section, writer]


@pytest.mark.parametrize(
    ("items", "num_writers", "message"),
    [
        ([Item("a", "model", 1, 2)], 2, "a: owner 2 is not one of the 2 writers"),
        ([Item("a", "model", 1, -1)], 2, "a: owner -1 is not one of the 2 writers"),
        ([Item("a", "model", 1), Item("a", "model", 2)], 2, "a is in section 'model' twice"),
        ([Item("a", "other", 1)], 2, "a: section 'other' is not one of"),
        ([], 0, "num_writers=0"),
    ],
)
def test_what_cannot_be_is_refused(items, num_writers, message):
    with pytest.raises(SetupError, match=message):
        assign(items, num_writers)
