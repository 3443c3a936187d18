"""What is said about one tensor and about one file: plain values that a manifest keeps."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""By the name that safetensors files use; types with several values in a byte are left out."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_DIMS = 64  # what torch can hold
_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True)
class TensorFacts:
    """Type and shape of a tensor.

    Attributes:
        dtype: as safetensors files name it, a key of `DTYPES`.
        shape: empty for a tensor of one value without dimensions.

    Raises:
        ValueError: there can be no such tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"the dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if len(self.shape) > _MOST_DIMS or any(size < 0 for size in self.shape):
            raise ValueError(f"no tensor has the shape {list(self.shape)}")
        # sizes next to a 0 count too: torch multiplies them for the strides
        if math.prod(max(size, 1) for size in self.shape) * self.itemsize > _MOST_BYTES:
            raise ValueError(f"the shape {list(self.shape)} is larger than any memory")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch names it."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class FileFacts:
    """One file as it was written.

    Attributes:
        size: in bytes.
        sha256: of its content, in hexadecimal.
        sums: the checksum `WordSums` of its content; None where it was not noted.
    """

    size: int
    sha256: str
    sums: str | None = None


def facts_of(tensor: Tensor) -> TensorFacts:
    """Type and shape of ``tensor``.

    Raises:
        ValueError: no safetensors file holds its type.
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{tensor.dtype} cannot be kept in a checkpoint: it is not in safetensors")
    return TensorFacts(_NAMES[tensor.dtype], tuple(tensor.shape))
