"""Batches for training and evaluation: pure functions of the step."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dmuon_platform.data.bigram import load_counts
from dmuon_platform.data.info import BIGRAM_FILE, DatasetInfo, read_index
from dmuon_platform.data.permutation import Permutation
from dmuon_platform.data.shards import TokenStream

# T: predicted tokens of a sample. A sample has T + 1 tokens: T inputs and, one later, T targets.


class Dataset:
    """A prepared dataset, opened for reading; any number of processes may do so at once."""

    def __init__(self, info: DatasetInfo) -> None:
        self.info = info
        folder, dtype = Path(info.folder), np.dtype(info.dtype)
        self._train = TokenStream(folder, list(info.train_shards), dtype)
        self._validation = TokenStream(folder, list(info.validation_shards), dtype)

    @property
    def num_validation_sequences(self) -> int:
        """Held-out samples."""
        return self.info.num_validation_sequences

    def batch(self, step: int, rows: slice, global_batch_size: int, seed: int) -> Tensor:
        """Return rows of the global batch of ``step``, as int64 of n x (T + 1).

        The global batches of all steps run through one seeded permutation of the samples after
        the other, so that each sample comes once an epoch. Which rank asks for which rows, and in
        how many parts, makes no difference.

        Args:
            step: Counted from 0.
            rows: Which rows of the global batch.
            global_batch_size: Rows of a step over all ranks.
            seed: Of the order.
        """
        places = step * global_batch_size + np.arange(global_batch_size, dtype=np.int64)[rows]
        return self._samples(self._train, self.sample_numbers(places, seed))

    def sample_numbers(self, places: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
        """Return which sample stands at each place of the endless row of epochs."""
        size = self.info.num_train_sequences
        epochs, within = np.divmod(places, size)
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            numbers[chosen] = Permutation(size, seed, int(epoch))(within[chosen])
        return numbers

    def validation_batch(self, first: int, num_sequences: int) -> Tensor:
        """Return held-out samples ``first`` to ``first + num_sequences``, as n x (T + 1).

        They are numbered in a fixed shuffled order, so that the first few are drawn from the whole
        of the held-out part.
        """
        places = np.arange(first, first + num_sequences, dtype=np.int64)
        if num_sequences < 0 or first < 0 or first + num_sequences > self.num_validation_sequences:
            raise IndexError(
                f"held-out samples {first} to {first + num_sequences} of "
                f"{self.num_validation_sequences}"
            )
        order = Permutation(self.num_validation_sequences, seed=0, epoch=0)
        return self._samples(self._validation, order(places))

    def bigram_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return how often one byte follows another, in the training and in the held-out text."""
        train, validation = load_counts(Path(self.info.folder) / BIGRAM_FILE)
        return train, validation

    def _samples(self, stream: TokenStream, numbers: npt.NDArray[np.int64]) -> Tensor:
        length = self.info.sequence_length
        samples = torch.empty(len(numbers), length + 1, dtype=torch.int64)
        for row, number in enumerate(numbers):
            samples[row] = torch.from_numpy(stream.read(int(number) * length, length + 1))
        return samples


def open_dataset(folder: Path | str) -> Dataset:
    """Open a prepared dataset.

    Raises:
        PlatformError: It was not finished, or its files are missing or cut.
    """
    return Dataset(read_index(Path(folder)))
