"""How well a model predicts, in a unit that tokenizers share: bits for a byte of text."""

import math

from dmuon_platform.data import Dataset, DatasetInfo
from dmuon_platform.data.bigram import bigram_bits


def bits_per_byte(nats_per_token: float, info: DatasetInfo) -> float:
    """Return the bits a byte of held-out text takes, given its mean loss a token.

    What separators between documents cost is spread over the bytes.
    """
    return nats_per_token / math.log(2) / info.bytes_per_token


def bigram_bits_per_byte(dataset: Dataset) -> float:
    """Return the same for a bigram model of the bytes: a floor for what counts as learning.

    Fitted on the training text and scored on all held-out text, with the ends of documents as a
    symbol, as for byte tokens; whatever the tokenizer of the dataset. The counts were made when
    the dataset was prepared, so this takes no time.
    """
    train, validation = dataset.bigram_counts()
    return bigram_bits(train, validation) / dataset.info.validation_bytes
