"""Newton-Schulz of a batch as one launch.

It is 20 to 40 kernels of a few microseconds each, which a host launches more slowly than a GPU runs
them. A CUDA graph holds them all. What a graph reads and writes has fixed addresses, so batches are
written into one room that stays. This is the one file that may use ``torch.cuda``.
"""

import torch

from dmuon.batching import Workspace
from dmuon.newton_schulz import Triple, newton_schulz_

_Key = tuple[torch.Size, tuple[int, ...], torch.dtype, tuple[Triple, ...], float]


class GraphWorkspace(Workspace):
    """Runs what it sees for the first time as it is, captures it the second time, then replays.

    The first run sets up what must not be set up in a capture, and what runs once only is not worth
    one. Graphs share the memory of their intermediate results, for none is used after its replay.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rooms: dict[torch.dtype, torch.Tensor] = {}
        self._graphs: dict[_Key, torch.cuda.CUDAGraph | None] = {}  # None: seen once
        self._memory = torch.cuda.graph_pool_handle()

    def room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """At least ``numel`` elements; a larger room than before makes the graphs of it void."""
        room = self._rooms.get(dtype)
        if room is None or room.numel() < numel:
            self._graphs = {key: graph for key, graph in self._graphs.items() if dtype not in key}
            self._rooms[dtype] = room = super().room(numel, dtype)
        return room

    def orthogonalize_(
        self, batch_Bmn: torch.Tensor, schedule: tuple[Triple, ...], eps: float
    ) -> None:
        """`newton_schulz_` of a batch that lies at the start of the last ``room``."""
        key = (batch_Bmn.shape, batch_Bmn.stride(), batch_Bmn.dtype, schedule, eps)
        if key not in self._graphs or torch.cuda.is_current_stream_capturing():
            self._graphs.setdefault(key)
            newton_schulz_(batch_Bmn, schedule, eps)
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            # other threads of this process (data loaders, NCCL's watchdog) go on meanwhile
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                newton_schulz_(batch_Bmn, schedule, eps)
        graph.replay()


def make_workspace(device: torch.device) -> Workspace:
    """What suits ``device``."""
    return GraphWorkspace(device) if device.type == "cuda" else Workspace(device)
