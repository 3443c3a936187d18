"""What the library says to mistakes with models, optimizers and state, on one rank of gloo."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from provocations import flags, library, saving
from provocations.form import check_words
from ranks_runner import run_ranks
from tiny import build, is_proj
from torch.distributed.device_mesh import DeviceMesh
from wrapped import make_mesh, prepare

import dmuon


def test_every_message_names_the_thing_the_rule_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    def body(rank: int) -> None:
        model = prepare(make_mesh(1))
        ready = library.Ready(model, dmuon.Muon(model), make_mesh(1), tmp_path)
        for row in [*library.ROWS, *saving.ROWS, *flags.ROWS]:
            row.check(ready)
        with dmuon.watch_updates(ready.optimizer), pytest.raises(dmuon.SetupError) as caught:
            dmuon.watch_updates(ready.optimizer).__enter__()
        check_words(str(caught.value), "are watched already", "leave that block of watch_updates")
        assert [each.name for each in tmp_path.iterdir()] == ["file"]

    run_ranks(1, body)


def test_a_mesh_that_does_not_fit_is_refused_on_the_ranks_it_does_not_fit() -> None:
    def body(rank: int) -> None:
        falling = DeviceMesh("cpu", [1, 0])
        with pytest.raises(dmuon.SetupError, match="must be in ascending order, got \\[1, 0\\]"):
            dmuon.dedicate_params(build(), falling, is_proj)
        first = DeviceMesh("cpu", torch.tensor([0]))
        if rank == 1:
            with pytest.raises(
                dmuon.SetupError, match=r"is not part of .*; call this on its ranks"
            ):
                dmuon.dedicate_params(build(), first, is_proj)

    run_ranks(2, body)


def test_without_a_process_group_it_is_asked_for() -> None:
    def body(rank: int) -> None:
        mesh = make_mesh(1)
        dist.destroy_process_group()
        with pytest.raises(dmuon.SetupError, match="no process group; call init_process_group or"):
            dmuon.dedicate_params(build(), mesh, is_proj)
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    run_ranks(1, body)
