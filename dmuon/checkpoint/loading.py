"""Loading a checkpoint on any mesh: every rank reads the slices that it needs, and nothing else.

Everything is checked on all ranks before anything changes.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon import dedication as dedications
from dmuon.agreement import gather_objects
from dmuon.call_order import Call
from dmuon.checkpoint.content import Content, Entry, OwnedEntry, content_of
from dmuon.checkpoint.facts import TensorFacts
from dmuon.checkpoint.gathering import is_in_rows, row_bounds
from dmuon.checkpoint.manifest import Manifest, OptimizerFacts
from dmuon.checkpoint.source import Source, open_source
from dmuon.dedication import Dedication
from dmuon.errors import CheckpointError, DamagedCheckpointError, SetupError
from dmuon.model_state import set_extra_state
from dmuon.optimizer import Muon
from dmuon.optimizer_state import MOMENTS, live_group, symmetric_params
from dmuon.parcel import MASTER_DTYPE
