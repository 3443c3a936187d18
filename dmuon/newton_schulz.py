"""Newton-Schulz orthogonalisation of whole matrices.

Letters: ``M x N`` the matrix, ``m = min(M, N)``, ``n = max(M, N)``, leading dimensions a batch.
"""

from collections.abc import Sequence

import torch

Triple = tuple[float, float, float]
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


def newton_schulz(
    matrix: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = POLAR_EXPRESS_COEFFICIENTS,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Orthogonalise ``matrix``: its nearest semi-orthogonal matrix, ``U V^T`` of its SVD.

    Each step is ``X <- a X + (b A + c A A) X`` with ``A = X X^T``, starting from ``X`` divided by
    its Frobenius norm (Jordan et al. 2024, "Muon"; arXiv 2505.16932 for the coefficients).

    Args:
        matrix: ``(..., M, N)``; each trailing matrix is orthogonalised on its own.
        steps: number of iterations, at least 1.
        coefficients: one ``(a, b, c)`` for all steps, or one a step (the last repeats).
        dtype: of the arithmetic. None: bfloat16 on accelerators, float32 on CPU.
        eps: lower bound of the norm that is divided by.

    Returns:
        ``(..., M, N)`` in the dtype of the arithmetic.

    Raises:
        ValueError: for fewer than two dimensions, no steps, or malformed coefficients.
    """
    if not isinstance(matrix, torch.Tensor) or matrix.ndim < 2 or 0 in matrix.shape[-2:]:
        raise ValueError(f"newton_schulz needs a matrix (..., M, N), got {_shape_of(matrix)}")
    schedule = coefficient_schedule(coefficients, steps)
    X = matrix.to(dtype or default_dtype(matrix.device))
    is_tall = X.size(-2) > X.size(-1)
    if is_tall:
        X = X.mT
    X = (X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)).reshape(-1, *X.shape[-2:])
    for a, b, c in schedule:
        A = X @ X.mT
        # each sum is part of its product, so it is rounded once
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if is_tall else X).reshape(matrix.shape)


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
    triples = [coefficients] if is_single else list(coefficients)
    checked: list[Triple] = []
    for triple in triples:
        if not isinstance(triple, Sequence) or len(triple) != 3:
            raise ValueError(
                f"ns_coefficients must be one (a, b, c), or one a step; got the entry {triple!r}"
            )
        a, b, c = (float(value) for value in triple)
        checked.append((a, b, c))
    if not checked:
        raise ValueError("ns_coefficients is empty; give one (a, b, c), or one a step")
    return [checked[min(step, len(checked) - 1)] for step in range(steps)]


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Floating point operations of ``steps`` steps on an ``rows x columns`` matrix.

    A step is ``X X^T`` (``2 m m n``), ``A A`` (``2 m m m``) and the product with ``X``
    (``2 m m n``).
    """
    m, n = min(rows, columns), max(rows, columns)
    return steps * (4 * m * m * n + 2 * m * m * m)
