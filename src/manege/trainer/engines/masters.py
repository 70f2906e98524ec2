"""Float32 copies of parameters that are held in less, for the optimiser.

bfloat16 has 8 bits: beside a weight of 0.05 the next one is 0.0002 away, and a step of 2e-5 is lost. So the optimiser
changes float32 copies, and the parameters are these, rounded. Gradients are gathered in float32 as they come, so that
many micro-batches add up to what one would give. Parameters of float32 are their own copies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Masters"]


class Masters:
    """Of the parameters that are trained."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._trained = trained
        self.parameters: Sequence[nn.Parameter] = [_master(parameter) for parameter in trained]
        """What the optimiser changes; backward passes leave the gradients here."""

    @property
    def are_copies(self) -> bool:
        """Whether any is another tensor than the model's."""
        return any(master is not parameter for master, parameter in zip(self.parameters, self._trained, strict=True))

    @torch.no_grad()
    def write_back(self) -> None:
        """Round them into the model."""
        for parameter, master in zip(self._trained, self.parameters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    @torch.no_grad()
    def read(self, values: Sequence[Tensor] | None = None) -> None:
        """From a checkpoint, or from the model."""
        for master, value in zip(self.parameters, self._trained if values is None else values, strict=True):
            if master is not value:
                master.copy_(value)
        self.write_back()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype.itemsize >= 4:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def gather(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(gather)
    return master
