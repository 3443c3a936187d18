"""Ways to save and load a training: ours, ``torch.distributed.checkpoint``, and ``torch.save``.

All save weights and optimizer state, and wait until it is on the disk.
"""

import os
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import dmuon
from dmuon.bench.contenders import Contender


class Way(Protocol):
    """One way to save and load; every method is collective."""

    name: str
    contender: Contender
    can_save_beside: bool

    def save(self, path: Path) -> None:
        """Save, and return when it is on the disk."""

    def start_save(self, path: Path) -> Any:
        """Begin to save, and return when training may go on; if it ``can_save_beside``."""

    def wait_copied(self, started: Any) -> None:
        """Wait until training may change weights."""

    def finish_save(self, started: Any) -> None:
        """Wait for what ``start_save`` began."""

    def load(self, path: Path) -> None:
        """Load what was saved."""


class Owners:
    """``dmuon.save_checkpoint``: SHA-256 and a checksum while writing, which loading compares."""

    name = "dmuon"
    can_save_beside = True
    verify_hashes = True

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._model = contender.model
        assert isinstance(contender.optimizer, dmuon.Muon)
        self._optimizer = contender.optimizer

    def save(self, path: Path) -> None:
        """See `Way.save`."""
        dmuon.save_checkpoint(path, self._model, self._optimizer)

    def start_save(self, path: Path) -> dmuon.SaveHandle:
        """See `Way.start_save`."""
        return dmuon.save_checkpoint(path, self._model, self._optimizer, async_save=True)

    def wait_copied(self, started: dmuon.SaveHandle) -> None:
        """See `Way.wait_copied`."""
        started.wait_copied()

    def finish_save(self, started: dmuon.SaveHandle) -> None:
        """See `Way.finish_save`."""
        started.wait()

    def load(self, path: Path) -> None:
        """See `Way.load`."""
        dmuon.load_checkpoint(path, self._model, self._optimizer, verify_hashes=self.verify_hashes)


class OwnersUnhashed(Owners):
    """The same, loaded without comparing contents, as the others load."""

    name = "dmuon, verify_hashes=False"
    verify_hashes = False


class Sharded:
    """``torch.distributed.checkpoint`` of ``fully_shard`` with AdamW; it has no hashes."""

    name = "torch.distributed.checkpoint"
    can_save_beside = True

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._model, self._optimizer = contender.model, contender.optimizer
        self._group = dist.new_group(backend="gloo")

    def save(self, path: Path) -> None:
        """See `Way.save`."""
        save(self._state(), checkpoint_id=path)

    def start_save(self, path: Path) -> Any:
        """See `Way.start_save`."""
        return async_save(self._state(), checkpoint_id=path, process_group=self._group)

    def wait_copied(self, started: Any) -> None:
        """See `Way.wait_copied`; it copies before it returns."""

    def finish_save(self, started: Any) -> None:
        """See `Way.finish_save`."""
        started.result()
        dist.barrier()

    def load(self, path: Path) -> None:
        """See `Way.load`."""
        state = self._state()
        load_sharded(state, checkpoint_id=path)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


class Gathered:
    """Everything to the first rank, then ``torch.save``: the recipe of many scripts."""

    name = "torch.save on rank 0"
    can_save_beside = False

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._model: nn.Module = contender.model
        assert isinstance(contender.optimizer, dmuon.Muon)
        self._optimizer = contender.optimizer

    def save(self, path: Path) -> None:
        """See `Way.save`."""
        how = {"cpu_offload": True, "rank0_only": True}
        model = dmuon.get_model_state_dict(self._model, **how)
        optimizer = dmuon.get_optimizer_state_dict(self._model, self._optimizer, **how)
        if dist.get_rank() == 0:
            path.mkdir()
            with (path / "all.pt").open("wb") as file:
                torch.save({"model": model, "optimizer": optimizer}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def start_save(self, path: Path) -> None:
        """See `Way.start_save`."""

    def wait_copied(self, started: None) -> None:
        """See `Way.wait_copied`."""

    def finish_save(self, started: None) -> None:
        """See `Way.finish_save`."""

    def load(self, path: Path) -> None:
        """See `Way.load`."""
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0:
            state = torch.load(path / "all.pt", weights_only=True)
        dmuon.set_model_state_dict(self._model, state["model"])
        dmuon.set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
