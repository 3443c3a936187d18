"""Where matrices lie in a parameter: stacks, convolutions, splits, and what the default chooses."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dmuon
from dmuon.layout import Layout, Site, make_layout, site_of
from dmuon.selection import select

CONVOLUTION = Site("convolution")
GROUPED = Site("convolution", groups=2)


@pytest.mark.parametrize(
    ("shape", "site", "kind", "parts"),
    [
        ((6, 4), Site(), "matrix", ((1, 6, 4),)),
        ((6, 4), Site("parametrization"), "matrix", ((1, 6, 4),)),
        ((3, 6, 4), Site(), "stack", ((3, 6, 4),)),
        ((6, 4, 3), CONVOLUTION, "convolution", ((1, 6, 12),)),
        ((6, 4, 3, 5), CONVOLUTION, "convolution", ((1, 6, 60),)),
        ((6, 4, 3, 5), GROUPED, "convolution", ((2, 3, 60),)),
        ((6, 4, 2, 2, 2), CONVOLUTION, "convolution", ((1, 6, 32),)),
    ],
)
def test_shape_and_module_say_which_matrices_there_are(
    shape: tuple[int, ...], site: Site, kind: str, parts: tuple[tuple[int, int, int], ...]
) -> None:
    layout = make_layout("w", shape, [site, site])
    assert (layout.kind, layout.parts) == (kind, parts)
    assert layout.num_matrices == parts[0][0]


@pytest.mark.parametrize(
    ("module", "site"),
    [
        (nn.Conv1d(4, 6, 3), CONVOLUTION),
        (nn.Conv2d(4, 6, 3, groups=2), GROUPED),
        (nn.ConvTranspose3d(4, 6, 3, groups=2), GROUPED),
        (nn.Linear(4, 6), Site()),
    ],
)
def test_convolutions_of_every_kind_are_told_by_their_class(module: nn.Module, site: Site) -> None:
    assert site_of(module) == site


def test_a_convolution_is_the_matrix_of_its_patches_one_a_group() -> None:
    convolution = nn.Conv2d(6, 8, 3, groups=2, bias=False)
    layout = make_layout("w", convolution.weight.shape, [site_of(convolution)])
    (matrices,) = layout.views(convolution.weight)
    image = torch.randn(1, 6, 5, 5)
    patches = nn.functional.unfold(image, 3).view(2, -1, 9)
    torch.testing.assert_close((matrices @ patches).view(1, 8, 3, 3), convolution(image))


def test_a_transposed_convolution_is_the_adjoint_of_the_same_matrix() -> None:
    transposed = nn.ConvTranspose2d(8, 6, 3, groups=2, bias=False)
    layout = make_layout("w", transposed.weight.shape, [site_of(transposed)])
    (matrices,) = layout.views(transposed.weight)
    image = torch.randn(1, 8, 3, 3)
    patches = (matrices.mT @ image.view(2, 4, 9)).view(1, -1, 9)
    torch.testing.assert_close(nn.functional.fold(patches, (5, 5), 3), transposed(image))


@pytest.mark.parametrize(
    ("shape", "sites", "match"),
    [
        ((6,), [Site()], r"w has shape \(6,\); .*two dimensions or more.*Leave it out"),
        ((), [Site()], "two dimensions"),
        ((0, 6), [Site()], "two dimensions"),
        ((2, 3, 4, 5), [Site()], r"\(2, 3, 4, 5\).*stack of matrices \(E, M, N\)"),
        ((6, 4, 3), [Site("parametrization")], "parametrization"),
        ((6, 4, 3), [CONVOLUTION, Site()], "tied between modules that read it as different"),
        ((6, 4, 3), [CONVOLUTION, GROUPED], "tied between modules that read it as different"),
        ((7, 4, 3), [GROUPED], "not divided by 2 groups"),
    ],
)
def test_what_no_rule_covers_is_refused_by_name(
    shape: tuple[int, ...], sites: list[Site], match: str
) -> None:
    with pytest.raises(dmuon.SetupError, match=match):
        make_layout("w", shape, sites)


@pytest.mark.parametrize(
    ("shape", "site", "split", "parts"),
    [
        ((9, 4), Site(), dmuon.Split((4, 3, 2)), [(1, 4, 4), (1, 3, 4), (1, 2, 4)]),
        ((4, 9), Site(), dmuon.Split((4, 3, 2), dim=1), [(1, 4, 4), (1, 4, 3), (1, 4, 2)]),
        ((9, 4), Site(), dmuon.Split(3), [(1, 3, 4)] * 3),
        ((5, 6, 4), Site(), dmuon.Split((2, 4)), [(5, 2, 4), (5, 4, 4)]),
        ((5, 6, 4), Site(), dmuon.Split(2, dim=1), [(5, 6, 2)] * 2),
        ((8, 3, 2), GROUPED, dmuon.Split(2), [(2, 2, 6)] * 2),
    ],
)
def test_views_of_a_split_partition_each_matrix(
    shape: tuple[int, ...], site: Site, split: dmuon.Split, parts: list[tuple[int, int, int]]
) -> None:
    layout = make_layout("w", shape, [site], split)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    views = layout.views(tensor)
    assert [tuple(view.shape) for view in views] == list(layout.parts) == parts
    B, M, N = layout.matrices
    assert torch.equal(torch.cat(views, 1 + split.dim), tensor.view(B, M, N))
    for view in views:
        view.zero_()
    assert not tensor.any()


def test_equal_splits_are_equal_however_they_are_written() -> None:
    written_out = make_layout("w", (9, 4), split=dmuon.Split([3, 3, 3]))  # type: ignore[arg-type]
    assert written_out == make_layout("w", (9, 4), split=dmuon.Split(3))
    assert make_layout("w", (9, 4), split=dmuon.Split(9)) == make_layout("w", (9, 4))


@pytest.mark.parametrize("sizes", [(), 0, -1, (3, 0), (3, 1.5), 2.0, True, (True, 2), "33", None])
def test_sizes_of_a_split_are_positive_whole_numbers(sizes: object) -> None:
    with pytest.raises(dmuon.SetupError, match="positive whole numbers"):
        dmuon.Split(sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [2, -1, 0.0, True, None])
def test_dim_of_a_split_is_rows_or_columns(dim: object) -> None:
    with pytest.raises(dmuon.SetupError, match=r"0 \(rows of each matrix\) or 1 \(columns\)"):
        dmuon.Split(3, dim=dim)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "match"),
    [
        (dmuon.Split((4, 4)), r"w has shape \(9, 4\).*9 rows.*sizes \(4, 4\).*add up to 8;.*to 9"),
        (dmuon.Split((4, 4), dim=1), r"4 columns.*sizes \(4, 4\).*add up to 8;.*to 4"),
        (dmuon.Split(2), "sizes 2 .*add up to 8"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(split: dmuon.Split, match: str) -> None:
    with pytest.raises(dmuon.SetupError, match=match):
        make_layout("w", (9, 4), split=split)


def test_a_layout_says_what_it_is() -> None:
    def text(shape: tuple[int, ...], site: Site, split: dmuon.Split | None = None) -> str:
        return str(make_layout("w", shape, [site], split))

    assert text((6, 4), Site()) == "matrix"
    assert text((3, 6, 4), Site(), dmuon.Split(3)) == "stack of 3, rows split in 2 x 3"
    assert text((6, 4, 3), GROUPED) == "convolution of 2 groups"
    assert text((4, 9), Site(), dmuon.Split((4, 3, 2), 1)) == "matrix, columns split in 4 + 3 + 2"


def meta(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


@pytest.mark.parametrize(
    ("name", "shape", "is_chosen"),
    [
        ("layers.0.mlp.experts.gate_up_proj", (4, 96, 32), True),
        ("layers.0.mlp.experts.gate_up_proj_bias", (4, 96), False),
        ("layers.0.mlp.router.weight", (4, 32), True),
        ("stages.0.conv.weight", (8, 4, 3, 3), True),
        ("stages.0.dwconv.weight", (8, 1, 3, 3), False),
        ("stem.weight", (8, 3, 3, 3), False),
        ("blocks.0.prompt", (1, 5, 32), False),
        ("cls_token", (1, 1, 32), False),
        ("layers.0.mixer.A_log", (64, 16), False),
        ("layers.0.norm.weight", (32,), False),
        ("layers.0.pos_embed", (4, 5, 32), False),
        ("layers.0.output.weight", (32, 32), True),
        ("proj.weight", (32, 32), True),
        ("lm_head.weight", (41, 32), False),
    ],
)
def test_the_default_choice(name: str, shape: tuple[int, ...], is_chosen: bool) -> None:
    assert dmuon.is_hidden_matrix(name, meta(*shape)) == is_chosen


def chosen(model: nn.Module, predicate: object = dmuon.is_hidden_matrix) -> dict[str, Layout]:
    return {p.name: p.layout for p in select(model, predicate)}  # type: ignore[arg-type]


def test_the_default_passes_over_what_has_no_layout_and_another_predicate_may_not() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = meta(2, 3, 4, 5)
            self.conv = weight_norm(nn.Conv1d(4, 6, 3))
            self.linear = nn.Linear(3, 3)

    layers = nn.ModuleList([Odd()])
    assert list(chosen(layers)) == ["0.linear.weight"]
    for part, match in {"w": "0.w has shape", "original1": "parametrization"}.items():
        with pytest.raises(dmuon.SetupError, match=match):
            chosen(layers, lambda n, p, part=part: n.endswith(f".{part}"))


def test_tied_names_must_be_chosen_alike() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    (param,) = select(model, lambda n, p: True)
    assert (param.name, param.aliases, len(param.sites)) == ("a.weight", ["b.weight"], 2)
    with pytest.raises(dmuon.SetupError, match=r"b\.weight and a\.weight are one tied parameter"):
        select(model, lambda n, p: n == "b.weight")
    model = nn.ModuleDict({"0": model["a"], "head": model["b"]})
    model["1"] = nn.Linear(4, 4, bias=False)
    assert list(chosen(model)) == ["1.weight"]  # tied to a head
