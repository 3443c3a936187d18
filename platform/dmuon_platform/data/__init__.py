"""Text to training batches: sources, tokenizers, memory-mapped shards, and a sampler without state.

``prepare_dataset`` runs once, in the driver; ``open_dataset`` on every worker.
"""

from dmuon_platform.data.dataset import Dataset, open_dataset
from dmuon_platform.data.info import DatasetInfo
from dmuon_platform.data.prepare import (
    check_data,
    check_size,
    dataset_of,
    find_dataset,
    measure_data,
    prepare_dataset,
)
from dmuon_platform.data.settings import DataSettings
from dmuon_platform.data.sources import PYTHON_STDLIB, find_files
from dmuon_platform.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    FileTokenizer,
    check_has_tokenizer,
    check_pretrained,
    files_beside,
    load_tokenizer,
    tokenizer_files,
)

__all__ = [
    "BYTES",
    "PYTHON_STDLIB",
    "ByteTokenizer",
    "DataSettings",
    "Dataset",
    "DatasetInfo",
    "FileTokenizer",
    "check_data",
    "check_has_tokenizer",
    "check_pretrained",
    "check_size",
    "dataset_of",
    "files_beside",
    "find_dataset",
    "find_files",
    "load_tokenizer",
    "measure_data",
    "open_dataset",
    "prepare_dataset",
    "tokenizer_files",
]
