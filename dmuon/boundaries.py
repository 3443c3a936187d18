"""Which module's hooks serve a dedicated parameter: the one it is made whole and freed with."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon.parameter import DedicatedParam

Boundary = Callable[[str, nn.Module], bool]


class Boundaries:
    """The modules of a model whose hooks serve what lies in them; a snapshot.

    Args:
        model: the outermost module.
        is_boundary: ``(name, module) -> bool``: which modules may serve, the nearest one does;
            None: the nearest module given to ``fully_shard``; without any, the outermost element of
            a module list that has a forward of its own. Else it is the root, which is called for
            certain.

    Attributes:
        modules: every module by each of its names, parents first.
    """

    def __init__(self, model: nn.Module, is_boundary: Boundary | None) -> None:
        self.modules = list(model.named_modules(remove_duplicate=False))
        if is_boundary is None and any(
            isinstance(module, FSDPModule) for _, module in self.modules if module is not model
        ):
            is_boundary = _is_sharded
        by_name = dict(self.modules)
        self._serving = {"": ""}
        for name, module in self.modules[1:]:
            parent = name.rpartition(".")[0]
            serving = self._serving[parent]
            if is_boundary is not None:
                serving = name if is_boundary(name, module) else serving
            elif not serving and _is_layer(by_name[parent], module):
                serving = name
            self._serving[name] = serving

    def of(self, module_name: str) -> str:
        """The name of the module that serves the parameters of ``module_name``."""
        return self._serving[module_name]


def _is_sharded(name: str, module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _is_layer(parent: nn.Module, module: nn.Module) -> bool:
    return isinstance(parent, nn.ModuleList) and type(module).forward is not nn.Module.forward


def blocks_of(params: Sequence[DedicatedParam], boundaries: Boundaries) -> list[str]:
    """For each parameter the name of the module whose hooks serve it.

    The root serves what several blocks use: a tied parameter, or a module that they share.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in boundaries.modules:
        names.setdefault(module, []).append(name)
    by_name = dict(boundaries.modules)
    blocks = []
    for param in params:
        modules = {
            by_name[boundaries.of(name)] for module, _ in param.sites for name in names[module]
        }
        blocks.append(names[modules.pop()][0] if len(modules) == 1 else "")
    return blocks
