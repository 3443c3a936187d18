"""Newton-Schulz orthogonalisation of whole matrices.

Letters: ``M x N`` the matrix, ``m = min(M, N)``, ``n = max(M, N)``, leading dimensions a batch;
``X`` the iterate, lying down (``m x n``), ``R = X X^T`` its Gram matrix (``m x m``), ``(a, b, c)``
the coefficients of a step, ``P = a I + b R + c R R``, so that a step is ``X <- P X``.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, TypeVar

import torch

from dmuon.symmetric_product import gram_matrix, symmetric_sum

T = TypeVar("T")
Triple = tuple[float, float, float]
Product = tuple[int, int, int]  # an m x k by a k x n matrix
Coefficients = Triple | Sequence[Triple]

# Polar Express, "The Polar Express: Optimal Matrix Sign Methods" (arXiv 2505.16932), the minimax
# quintics for singular values in [1e-3, 1], before their safety factor.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # the paper's factor: p(x / 1.01) tolerates singular values rounded above 1

POLAR_EXPRESS_COEFFICIENTS: tuple[Triple, ...] = (
    *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
    _POLAR_EXPRESS[-1],
)
"""One ``(a, b, c)`` a step (arXiv 2505.16932, with its safety factor); the last repeats."""


CLASSIC_COEFFICIENTS: Triple = (3.4445, -4.7750, 2.0315)
"""One for all steps (Jordan et al. 2024, "Muon"), the default of ``torch.optim.Muon``."""

Form = Literal["direct", "gram"]

# How far a step's error in R may grow before R is made afresh from X, see `restart_blocks`. By
# experiment against float64 (these coefficients and others, 1 to 10 steps; Gaussian, low-rank and
# ill-conditioned matrices; float32 and bfloat16) the error is at most about that of the direct form
# times 2.5 up to a growth of 100, times 5 at 140, where bfloat16 overflows after more steps.
MAX_GROWTH = 100.0

# The Gram form is taken when it saves a tenth of the operations, of a matrix large enough to show
# it: there are a third more launches (on a CPU 64x256 gains 9 % instead of 29 %, 128x512 26 %).
_WORTHWHILE = 0.9
_SMALLEST_GRAM_SIDE = 128


def newton_schulz(
    matrix: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    form: Form | None = None,
) -> torch.Tensor:
    """Orthogonalise ``matrix``: its nearest semi-orthogonal matrix, ``U V^T`` of its SVD.

    Each step is ``X <- a X + (b R + c R R) X`` with ``R = X X^T``, starting from ``X`` divided by
    its Frobenius norm (Jordan et al. 2024, "Muon"; arXiv 2505.16932 for the coefficients).

    A matrix that holds a NaN or an infinity, or whose norm is beyond the range of its dtype, gives
    NaN everywhere; so does a bfloat16 one whose norm is above 1e19, where float32 has no squares.
    One whose norm is below ``eps`` gives less than a full update, in proportion.

    Args:
        matrix: ``(..., M, N)``; each trailing matrix is orthogonalised on its own.
        steps: number of iterations, at least 1.
        coefficients: one ``(a, b, c)`` for all steps, or one a step (the last repeats).
        dtype: of the arithmetic. None: bfloat16 on accelerators, float32 on CPU.
        eps: lower bound of the norm that is divided by.
        form: "direct" iterates on ``X``, "gram" mostly on ``R``, which is less work when ``n`` is
            well above ``m``. None: what `choose_form` says.

    Returns:
        ``(..., M, N)`` in the dtype of the arithmetic.

    Raises:
        ValueError: for fewer than two dimensions, complex numbers, no steps, malformed
            coefficients, or another form.
    """
    if not isinstance(matrix, torch.Tensor) or matrix.ndim < 2 or 0 in matrix.shape[-2:]:
        raise ValueError(f"newton_schulz needs a matrix (..., M, N), got {_shape_of(matrix)}")
    schedule = coefficient_schedule(coefficients, steps)
    rows, columns = matrix.shape[-2:]
    form = _form(form, rows, columns, schedule)
    dtype = _dtype(matrix, dtype)
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps!r}")
    X = _divided_by_norm(matrix.to(torch.promote_types(matrix.dtype, dtype)), eps).to(dtype)
    if rows > columns:
        X = X.mT
    X = X.reshape(-1, *X.shape[-2:])
    X = _iterate_on_gram(X, schedule) if form == "gram" else _iterate(X, schedule)
    return (X.mT if rows > columns else X).reshape(matrix.shape)


@torch.no_grad()
def newton_schulz_(batch_Bmn: torch.Tensor, schedule: Sequence[Triple], eps: float) -> None:
    """`newton_schulz` in place: of matrices that lie down, in the dtype they have.

    Args:
        batch_Bmn: ``m <= n``, contiguous or the transpose of what is.
        schedule: ``(a, b, c)`` of each step.
        eps: lower bound of the norm that is divided by.
    """
    _, m, n = batch_Bmn.shape
    form = _form(None, m, n, schedule)
    iterate = _iterate_on_gram if form == "gram" else _iterate
    iterate(_divided_by_norm(batch_Bmn, eps), schedule, out=batch_Bmn)


def _divided_by_norm(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    norm = _norm(matrix, eps).to(matrix.dtype)
    # if it is infinite now, dividing would give zeros; inf + 0 * inf is NaN, which callers see
    return matrix / torch.add(norm, norm, alpha=0)


def _norm(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """The Frobenius norm, at least ``eps``, in a dtype that holds the sum of the squares.

    Squares of float32 entries leave its range below 1e-19 and above 1e19: silent zeros. In float64
    they cannot, but torch makes a copy for it. Narrower entries are added up as they are read, in
    float32; there a bfloat16 norm above 1e19 is infinite, and one below 1e-18 counts as such.
    """
    is_narrow = matrix.dtype in (torch.bfloat16, torch.float16)
    dtype, least = (torch.float32, max(eps, 1e-18)) if is_narrow else (torch.float64, eps)
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True, dtype=dtype)
    return norm.clamp(min=least)


def _iterate(
    X: torch.Tensor, schedule: Sequence[Triple], out: torch.Tensor | None = None
) -> torch.Tensor:
    for left, (a, b, c) in _counted_down(schedule):
        R = gram_matrix(X)
        # each sum is part of its product, so it is rounded once
        B = symmetric_sum(R, R, R, beta=b, alpha=c)
        X = _times(B, X, None if left else out, beta=a)
    return X


def _iterate_on_gram(
    X: torch.Tensor, schedule: Sequence[Triple], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The same steps: all ``P`` are polynomials of one ``R``, so they commute with it.

    Within a block ``Q`` is the product of its ``P`` and ``R <- P R P``; only its ends touch ``n``.
    """
    identity = torch.eye(X.size(-2), dtype=X.dtype, device=X.device)
    for blocks_left, block in _counted_down(restart_blocks(schedule)):
        R = gram_matrix(X)
        Q: torch.Tensor | None = None
        for left, (a, b, c) in _counted_down(block):
            B = symmetric_sum(R, R, R, beta=b, alpha=c)
            if left:
                PR = symmetric_sum(R, R, B, beta=a)
                R = symmetric_sum(PR, PR, B, beta=a)
            Q = B.add(identity, alpha=a) if Q is None else symmetric_sum(Q, Q, B, beta=a)
        assert Q is not None  # no block is empty
        X = _times(Q, X, None if blocks_left else out)
    return X


def _times(
    P: torch.Tensor, X: torch.Tensor, out: torch.Tensor | None, *, beta: float = 0.0
) -> torch.Tensor:
    """``P X + beta X``, in ``out`` or new memory, which is laid out as ``X``.

    Of an ``X`` whose transpose is contiguous the transpose is computed. On CPUs products of 16-bit
    numbers copy a transposed ``X``, which takes as long as the product does, and one into memory
    that is not contiguous takes a thousand times as long.
    """
    if X.is_contiguous() or not X.mT.is_contiguous():
        return _sum_of(X, P, X, beta, out)
    return _sum_of(X.mT, X.mT, P.mT, beta, None if out is None else out.mT).mT


def _sum_of(
    S: torch.Tensor, A: torch.Tensor, B: torch.Tensor, beta: float, out: torch.Tensor | None
) -> torch.Tensor:
    """``A B + beta S``; `torch.baddbmm` would touch an ``S`` that it does not need."""
    return torch.baddbmm(S, A, B, beta=beta, out=out) if beta else torch.bmm(A, B, out=out)


def _counted_down(values: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Each value, after how many follow it."""
    return zip(range(len(values) - 1, -1, -1), values, strict=True)


def restart_blocks(schedule: Sequence[Triple]) -> list[list[Triple]]:
    """The steps between fresh computations of ``R`` from ``X`` in the Gram form.

    An error in a small eigenvalue of ``R``, about the rounding of the largest, grows ``a^2``-fold
    a step by ``R <- P R P``, while the singular value that it belongs to grows ``a``-fold only. So
    a block ends when the product of its ``a^2`` passes ``MAX_GROWTH``. With Polar Express and with
    the classic coefficients that makes 2, 2 and 1 of 5 steps.
    """
    blocks: list[list[Triple]] = [[]]
    growth = 1.0
    for triple in schedule:
        if growth > MAX_GROWTH:
            blocks.append([])
            growth = 1.0
        blocks[-1].append(triple)
        growth *= max(1.0, triple[0] * triple[0])
    return blocks


def _dtype(matrix: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if matrix.is_complex():
        raise ValueError(f"newton_schulz needs real numbers, got {matrix.dtype}")
    if dtype is None:
        return default_dtype(matrix.device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    return dtype


def _shape_of(value: object) -> object:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def default_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the arithmetic when none is asked for.

    A CPU without bfloat16 matrix units runs bfloat16 products 15 to 40 times slower than float32,
    and float32 is the more exact one, so CPUs use it.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def coefficient_schedule(coefficients: Coefficients, steps: int) -> list[Triple]:
    """The ``(a, b, c)`` of each of ``steps`` steps.

    Raises:
        ValueError: when there is no step, or an entry is not three numbers.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"ns_steps must be a whole number of at least 1, got {steps!r}")
    if not isinstance(coefficients, Sequence):
        raise ValueError(
            f"ns_coefficients must be one (a, b, c), or one a step; got {coefficients!r}"
        )
    is_single = len(coefficients) == 3 and all(isinstance(c, int | float) for c in coefficients)
    triples: list[Any] = [coefficients] if is_single else list(coefficients)
    checked: list[Triple] = []
    for triple in triples:
        is_triple = isinstance(triple, Sequence) and len(triple) == 3
        if not is_triple or not all(isinstance(value, Real) for value in triple):
            raise ValueError(
                f"ns_coefficients must be one (a, b, c), or one a step; got the entry {triple!r}"
            )
        a, b, c = (float(value) for value in triple)
        if not all(map(math.isfinite, (a, b, c))):
            raise ValueError(f"ns_coefficients must be finite numbers, got the entry {triple!r}")
        checked.append((a, b, c))
    if not checked:
        raise ValueError("ns_coefficients is empty; give one (a, b, c), or one a step")
    return [checked[min(step, len(checked) - 1)] for step in range(steps)]


def choose_form(
    rows: int,
    columns: int,
    steps: int = 5,
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
) -> Form:
    """The form that `newton_schulz` takes by itself.

    A function of shape, steps and coefficients alone: all ranks choose alike, whatever their
    device. Direct, unless the Gram form saves a tenth of the operations of a matrix large enough
    for operations to matter.
    """
    return _form(None, rows, columns, coefficient_schedule(coefficients, steps))


def newton_schulz_flops(
    rows: int, columns: int, steps: int = 5, *, form: Form | None = None
) -> int:
    """Floating point operations of ``steps`` Polar Express steps on a ``rows x columns`` matrix.

    Args:
        rows: of the matrix.
        columns: of the matrix.
        steps: number of iterations.
        form: None: what `choose_form` says.
    """
    return _default_flops(rows, columns, steps, form)


@lru_cache(maxsize=4096)  # the planner asks for the same few shapes once a matrix and owner
def _default_flops(rows: int, columns: int, steps: int, form: Form | None) -> int:
    schedule = coefficient_schedule(POLAR_EXPRESS_COEFFICIENTS, steps)
    form = _form(form, rows, columns, schedule)
    return _flops(form, rows, columns, schedule)


def newton_schulz_products(rows: int, columns: int, steps: int = 5) -> dict[Product, int]:
    """How often each matrix product runs in ``steps`` Polar Express steps, in the form chosen.

    Returns:
        By ``(m, k, n)``, an ``m x k`` by a ``k x n`` matrix.
    """
    schedule = coefficient_schedule(POLAR_EXPRESS_COEFFICIENTS, steps)
    return _products(_form(None, rows, columns, schedule), rows, columns, schedule)


def _form(form: Form | None, rows: int, columns: int, schedule: Sequence[Triple]) -> Form:
    if form is not None:
        if form not in ("direct", "gram"):
            raise ValueError(f'form must be "direct", "gram" or None to choose, got {form!r}')
        return form
    if min(rows, columns) < _SMALLEST_GRAM_SIDE:
        return "direct"
    gram, direct = (_flops(form, rows, columns, schedule) for form in ("gram", "direct"))
    return "gram" if gram <= _WORTHWHILE * direct else "direct"


def _flops(form: Form, rows: int, columns: int, schedule: Sequence[Triple]) -> int:
    products = _products(form, rows, columns, schedule)
    return sum(2 * m * k * n * times for (m, k, n), times in products.items())


def _products(
    form: Form, rows: int, columns: int, schedule: Sequence[Triple]
) -> dict[Product, int]:
    """Which products run, and how often.

    A direct step is ``X X^T``, ``R R`` and the product with ``X``. A block of k steps of the Gram
    form is ``X X^T``, ``R R`` k times, ``P R P`` and ``P Q`` k - 1 times, and ``Q X``.
    """
    m, n = min(rows, columns), max(rows, columns)
    lengths = [1] * len(schedule)
    if form == "gram":
        lengths = [len(block) for block in restart_blocks(schedule)]
    products: Counter[Product] = Counter()  # for square matrices, keys are equal
    for length in lengths:
        products[m, n, m] += 1
        products[m, m, m] += 4 * length - 3
        products[m, m, n] += 1
    return dict(products)
