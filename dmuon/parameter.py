"""One dedicated parameter: a leaf that stays in its module while its storage comes and goes."""

from dataclasses import dataclass, field

import torch
from torch import nn

from dmuon.layout import Layout


@dataclass(eq=False)
class DedicatedParam:
    """One hidden matrix, or several in one parameter, as every rank sees it.

    The ``nn.Parameter`` stays registered for ever, so autograd hooks and optimizer keys hold. Where
    its values are not at hand it is a view of a single NaN: shapes stay true, memory is free, and
    a read that nobody prepared shows at once instead of reading freed memory.

    Attributes:
        name: in the original model.
        sites: every ``(module, attribute)`` it is registered as; more than one when tied.
        shape: ``(M, N)``, or more dimensions.
        dtype: of the original parameter.
        owner: number of its owner.
        layout: where its matrices are.
        aliases: its other names, when tied.
        held: gradients gathered here under ``no_sync``, in a wider dtype than the leaf's.
    """

    name: str
    sites: list[tuple[nn.Module, str]]
    shape: torch.Size
    dtype: torch.dtype
    owner: int
    layout: Layout
    aliases: list[str] = field(default_factory=list)
    held: torch.Tensor | None = None

    @property
    def param(self) -> nn.Parameter:
        """The leaf, looked up anew: ``to_empty`` may have replaced the object."""
        module, attribute = self.sites[0]
        param = module._parameters[attribute]
        assert param is not None
        return param

    def hold_gradient(self, dtype: torch.dtype) -> None:
        """Set the leaf's gradient aside, where ``dtype`` is wider and several add up better."""
        grad = self.param.grad
        if grad is None or torch.promote_types(grad.dtype, dtype) == grad.dtype:
            return
        self.held = grad.to(dtype) if self.held is None else self.held.add_(grad)
        self.param.grad = None

    def take_gradient(self) -> torch.Tensor | None:
        """All that has gathered on this rank, which has nothing afterwards."""
        grad, held = self.param.grad, self.held
        self.drop_gradient()
        return grad if held is None else (held if grad is None else held.add_(grad))

    def drop_gradient(self) -> None:
        """Forget what has gathered on this rank."""
        self.param.grad = self.held = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def materialize(self, device: torch.device) -> None:
        """Replace a leaf on the meta device by one of NaN on ``device``, at all its sites."""
        param = self.param
        nan = torch.full((1,) * len(self.shape), float("nan"), dtype=param.dtype, device=device)
        leaf = nn.Parameter(nan.expand(self.shape), requires_grad=param.requires_grad)
        for module, attribute in self.sites:
            module._parameters[attribute] = leaf

    def hide(self, dtype: torch.dtype, device: torch.device) -> None:
        """Show a NaN of the right shape instead of values."""
        nan = torch.full((1,) * len(self.shape), float("nan"), dtype=dtype, device=device)
        self.param.data = nan.expand(self.shape)
