"""The manifest: what is said comes back as it was, and nothing else is believed."""

import json
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint_builders import rest_of, rewrite_manifest, signed, write_checkpoint

from dmuon.checkpoint.facts import FileFacts, TensorFacts
from dmuon.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    OptimizerFacts,
    read_manifest,
    write_manifest,
)
from dmuon.checkpoint.plain_json import decode, encode
from dmuon.errors import CheckpointError, DamagedCheckpointError, DMuonError
from dmuon.layout import Split

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([torch.bfloat16, torch.float32]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$tuple", "$x"]), inner)
        | st.dictionaries(st.integers() | st.tuples(st.text()), inner, max_size=2)
    ),
    max_leaves=8,
)


def types_in(value: object) -> object:
    """The value with the type of everything in it: 1 == 1.0 == True in Python."""
    if isinstance(value, dict):
        return [(types_in(key), types_in(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_in(item) for item in value]
    return type(value), value


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value):
    text = json.dumps(encode(value), allow_nan=False)
    assert types_in(decode(json.loads(text))) == types_in(value)


def test_numbers_that_are_none_come_back():
    back = decode(encode([float("nan"), float("inf"), -float("inf")]))
    assert [repr(value) for value in back] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_without_dims_comes_back_with_its_type(dtype):
    value = torch.tensor(3, dtype=dtype)
    back = decode(json.loads(json.dumps(encode({"lr": value}))))["lr"]
    assert back.dtype == dtype
    assert torch.equal(back, value)


@pytest.mark.parametrize("value", [torch.ones(2), object(), {1, 2}, b"x", 1j])
def test_what_is_not_plain_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"extra\['a'\]\[1\] is a .*: not plain data"):
        encode({"a": [0, value]}, "extra")


def full(step: int = 7) -> Manifest:
    return Manifest(
        step=step,
        files={
            "model.safetensors": FileFacts(400, "0" * 64, "b" * 64),
            "config.json": FileFacts(2, "a" * 64),
        },
        tensors={
            "model.safetensors": {"a.b": TensorFacts("F32", (3, 4)), "s": TensorFacts("U8", ())}
        },
        mesh={"replicate": 2, "shard": 4},
        tied={"c": "a.b"},
        optimizer=OptimizerFacts(
            [
                {
                    "betas": (0.9, 0.95),
                    "ns_dtype": torch.bfloat16,
                    "ns_coefficients": [(1.0, 2.0, 3.0)],
                }
            ],
            7,
            {"a.b": 7, "s": 7.0},
            {"a.b": Split((1, 2)), "d": Split((4, 4), dim=1)},
        ),
        extra={"loss": float("inf"), "é": [1, (2, None)]},
        versions={"torch": "2.11"},
        created=1.25,
    )


def test_a_manifest_comes_back_equal():
    back = Manifest.from_json(full().to_json())
    assert back == full()
    assert back.optimizer is not None
    assert types_in(back.optimizer.steps) == types_in({"a.b": 7, "s": 7.0})


def test_a_manifest_that_does_not_tell_splits_is_no_manifest_without_any():
    facts = full().optimizer
    for splits in (None, {}):
        manifest = replace(full(), optimizer=replace(facts, splits=splits))
        assert Manifest.from_json(manifest.to_json()).optimizer.splits == splits


def test_a_manifest_of_weights_alone_comes_back_equal():
    weights = replace(full(), optimizer=None, tied={}, extra={})
    assert Manifest.from_json(weights.to_json()) == weights


def test_the_text_has_the_documented_keys():
    content = json.loads(full().to_json())
    assert list(content) == [
        *("sha256", "format", "format_version", "step", "created", "versions", "mesh", "files"),
        *("tensors", "tied", "optimizer", "module_state", "extra"),
    ]
    assert content["files"]["model.safetensors"].keys() == {"size", "sha256", "sums"}
    assert content["files"]["config.json"].keys() == {"size", "sha256"}, "as older ones have it"
    assert content["tensors"]["model.safetensors"]["a.b"] == {"dtype": "F32", "shape": [3, 4]}


def test_the_digest_tells_contents_and_nothing_else():
    same = replace(full(step=8), created=9.0)
    other = replace(full(), files={**full().files, "config.json": FileFacts(2, "b" * 64)})
    assert full().digest() == same.digest()
    assert full().digest() != other.digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"extra": {"x": object()}},
        {"extra": {1: 2}},
        {"extra": {"x": "y" * 2**26}},
        {"step": -1},
        {"step": True},
        {"mesh": {"shard": 1.5}},
        {"created": float("nan")},
        {"optimizer": OptimizerFacts([{"lr": torch.ones(2)}], 1, {})},
        {"optimizer": OptimizerFacts([], 1, {"a": "x"})},
    ],
    ids=lambda changed: str(changed)[:24],  # no address in it: xdist collects in two processes
)
def test_a_manifest_that_could_not_be_read_is_never_committed(tmp_path, changed):
    write_manifest(tmp_path, full())
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_manifest(tmp_path, replace(full(), **changed))
    assert read_manifest(tmp_path) == full()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


BAD_NAMES = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "C:x", "a\0b", "a\nb", "x" * 256]


@pytest.mark.parametrize("name", [*BAD_NAMES, MANIFEST_FILE], ids=repr)
def test_a_file_name_that_is_not_plain_is_refused(tmp_path, name):
    write_checkpoint(tmp_path / "c")
    facts = {"size": 2, "sha256": "a" * 64}
    rewrite_manifest(tmp_path / "c", lambda content: content["files"].update({name: facts}))
    with pytest.raises(DamagedCheckpointError, match=r"not a plain file name|among its own files"):
        read_manifest(tmp_path / "c")


def in_tensor(key, value):
    def change(content):
        content["tensors"]["model-00002-of-00002.safetensors"]["down.weight"][key] = value

    return change


def in_file(key, value):
    return lambda content: content["files"]["config.json"].update({key: value})


LIES = {
    "a negative size": (in_file("size", -1), "'size' is no size"),
    "an absurd size": (in_file("size", 10**30), "'size' is no size"),
    "a size that is true": (in_file("size", True), "'size' is no size"),
    "a size that is a float": (in_file("size", 2.0), "'size' is no size"),
    "a size that is text": (in_file("size", "2"), "'size' is no size"),
    "a short hash": (in_file("sha256", "abc"), "'sha256' is no SHA-256"),
    "a short checksum": (in_file("sums", "abc"), "'sums' is no SHA-256"),
    "a checksum that is nothing": (in_file("sums", None), "'sums' is no text"),
    "a file that is a list": (lambda c: c["files"].update(x=[]), "'x' is not an object"),
    "a negative shape": (in_tensor("shape", [-7, -4]), "'shape' is no size"),
    "a fractional shape": (in_tensor("shape", [7.0, 4]), "'shape' is no size"),
    "a shape that is no list": (in_tensor("shape", "74"), "'shape' is no list"),
    "a shape larger than any memory": (in_tensor("shape", [2**40, 2**40]), "than any memory"),
    "a shape whose strides overflow": (in_tensor("shape", [0, 2**62, 2**62]), "than any memory"),
    "a shape of 65 dims": (in_tensor("shape", [1] * 65), "no tensor has the shape"),
    "a shape larger than its file": (in_tensor("shape", [700, 4]), "smaller than the tensors"),
    "an unknown dtype": (in_tensor("dtype", "F33"), "the dtype 'F33' is not one of"),
    "a dtype that is no text": (in_tensor("dtype", None), "'dtype' is no text"),
    "tensors in no file": (lambda c: c["tensors"].update(x={}), "not among its files"),
    "a tensor in two files": (
        lambda c: c["tensors"]["optim-00001-of-00001.safetensors"].update(
            {"embed.weight": {"dtype": "F32", "shape": [1]}}
        ),
        "'embed.weight' is in optim.* and in another file",
    ),
    "tied to nothing": (lambda c: c["tied"].update(x="y"), "'x' cannot stand for 'y'"),
    "tied to itself": (
        lambda c: c["tied"].update({"embed.weight": "embed.weight"}),
        "'embed.weight' cannot stand for",
    ),
    "another format": (lambda c: c.update(format="other"), "its format is 'other'"),
    "no format": (lambda c: c.pop("format"), "its format is None"),
    "no version": (lambda c: c.pop("format_version"), "'format_version' is no size"),
    "version 0": (lambda c: c.update(format_version=0), "there is no format version 0"),
    "no step": (lambda c: c.pop("step"), "'step' is no size"),
    "no files": (lambda c: c.pop("files"), "'files' is not an object"),
    "no tensors": (lambda c: c.pop("tensors"), "'tensors' is not an object"),
    "an optimizer that is a list": (lambda c: c.update(optimizer=[]), "optimizer is not an object"),
    "groups that are no list": (
        lambda c: c["optimizer"].update(param_groups={}),
        "param_groups are no list",
    ),
    "splits that are a list": (lambda c: c["optimizer"].update(splits=[]), "no splits by name"),
    "a split into nothing": (
        lambda c: c["optimizer"].update(splits={"x": {"sizes": [0], "dim": 0}}),
        "'x' is no split",
    ),
    "a split into text": (
        lambda c: c["optimizer"].update(splits={"x": {"sizes": "12", "dim": 0}}),
        "'x' is no split",
    ),
    "a split without a dim": (
        lambda c: c["optimizer"].update(splits={"x": {"sizes": [1, 2]}}),
        "'x' is no split",
    ),
    "steps that are text": (lambda c: c["optimizer"]["steps"].update(x="1"), "'x' is no number"),
    "an unknown kind of value": (lambda c: c.update(extra={"$run": "x"}), "no value that was"),
    "a dtype that is a function": (lambda c: c["extra"].update(x={"$dtype": "save"}), "no value"),
    "a scalar that is a list": (
        lambda c: c["extra"].update(x={"$scalar": [[[1] * 9], {"$dtype": "int8"}]}),
        "no value",
    ),
    "a scalar of a type too small for it": (
        lambda c: c["extra"].update(x={"$scalar": [300, {"$dtype": "int8"}]}),
        "no value",
    ),
    "a scalar that overflows": (
        lambda c: c["extra"].update(x={"$scalar": [2**80, {"$dtype": "int8"}]}),
        "no value",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused_with_what_is_wrong(tmp_path, lie):
    folder = tmp_path / "c"
    write_checkpoint(folder)
    change, message = LIES[lie]
    rewrite_manifest(folder, change)
    with pytest.raises(DamagedCheckpointError, match=message) as raised:
        read_manifest(folder)
    assert raised.value.path == folder


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (
            ' "format": "dmuon-checkpoint",\n "format": "dmuon-checkpoint"\n}\n',
            "key 'format' twice",
        ),
        (' "extra": {"a": {"b": 1, "c": 2, "b": 1}}\n}\n', "key 'b' twice"),
        (' "step": NaN\n}\n', "NaN is no number in JSON"),
        (' "step": ' + "9" * 5000 + "\n}\n", "integer"),
        (' "extra": ' + "[" * 100_000 + "]" * 100_000 + "\n}\n", "nested too deeply"),
        (' "extra": {"a": 1', "delimiter|Expecting"),
    ],
    ids=["a key twice", "a deep key twice", "NaN", "a long number", "a deep one", "a cut one"],
)
def test_json_that_python_would_take_or_choke_on_is_refused(tmp_path, rest, message):
    (tmp_path / MANIFEST_FILE).write_text(signed(rest))
    with pytest.raises(DamagedCheckpointError, match=message):
        read_manifest(tmp_path)


@settings(max_examples=150)
@given(st.data())
def test_whatever_is_said_is_taken_or_refused_and_nothing_else(data):
    """Any part of a manifest replaced by anything: a manifest or a ValueError."""
    content = json.loads("{" + rest_of(full().to_json()))
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.text(max_size=2)
                | st.sampled_from(["$tuple", "$dict", "$dtype", "$scalar", "$float", "size"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=6,
    )
    place = content
    while data.draw(st.booleans()):
        inner = [item for item in place.values() if isinstance(item, dict) and item]
        if not inner:
            break
        place = data.draw(st.sampled_from(inner))
    place[data.draw(st.sampled_from(list(place)))] = data.draw(anything)
    text = signed(json.dumps(content, indent=1).removeprefix("{\n"))
    with suppress(ValueError):
        Manifest.from_json(text)


@pytest.mark.parametrize("depth", [100, 400, 600, 800, 1000, 30_000])
def test_data_nested_deeply_is_taken_or_refused(tmp_path, depth):
    write_checkpoint(tmp_path / "c")
    path = tmp_path / "c" / MANIFEST_FILE
    nested = '{"a": ' * depth + "1" + "}" * depth
    path.write_text(signed(rest_of(path.read_text()).replace('"loss": 1.5', f'"loss": {nested}')))
    with suppress(DamagedCheckpointError):
        read_manifest(tmp_path / "c")


def test_a_newer_format_is_refused_by_name_and_is_not_called_damaged(tmp_path):
    folder = tmp_path / "c"
    write_checkpoint(folder)
    rewrite_manifest(folder, lambda content: content.update(format_version=2, files="otherwise"))
    with pytest.raises(CheckpointError, match=r"version 2 is newer than 1.*update dmuon") as raised:
        read_manifest(folder)
    assert not isinstance(raised.value, DamagedCheckpointError)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format_version": 1}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_the_manifest_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / MANIFEST_FILE
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json cannot be read"):
        read_manifest(tmp_path)


def test_a_manifest_without_end_is_not_read(tmp_path):
    with (tmp_path / MANIFEST_FILE).open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(DamagedCheckpointError, match="larger than"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("kind", [CheckpointError, DamagedCheckpointError])
def test_errors_survive_pickling(kind):
    error = pickle.loads(pickle.dumps(kind(Path("/a/step-1"), "x is missing")))
    assert type(error) is kind
    assert isinstance(error, DMuonError)
    assert isinstance(error, RuntimeError)
    assert (error.path, error.reason) == (Path("/a/step-1"), "x is missing")
    assert "/a/step-1" in str(error)
    assert "x is missing" in str(error)
