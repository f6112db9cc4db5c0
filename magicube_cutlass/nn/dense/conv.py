"""A convolution without groups as a quantized linear layer over patches."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn


class PatchLinear(nn.Module):
    """Convolution over one or two dimensions by a linear layer: ``unfold(x)`` times the filters.

    A 1 x 1 convolution of stride 1 makes no patches.

    Parameters
    ----------
    conv : nn.Conv1d or nn.Conv2d
        Without groups, with zero padding; its weights are not read.
    linear : nn.Module
        Layer from C * kernel elements to the output channels.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> conv = torch.nn.Conv2d(3, 8, 3, padding=1)
    >>> linear = mc.nn.QuantLinear.from_linear(flat_linear(conv))
    >>> PatchLinear(conv, linear)(torch.randn(2, 3, 9, 7)).shape
    torch.Size([2, 8, 9, 7])
    """

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.dims = len(conv.kernel_size)
        lead = (1,) * (2 - self.dims)  # a 1-D convolution has a height of 1
        self.kernel, self.stride, self.dilation = (
            (*lead, *each) for each in (conv.kernel_size, conv.stride, conv.dilation)
        )
        self.padding = tuple(conv._reversed_padding_repeated_twice)  # as F.pad takes it

    def forward(self, x: Tensor) -> Tensor:
        batched = x if x.ndim == self.dims + 2 else x.unsqueeze(0)  # (B, C, (H,) W)
        if any(self.padding):
            batched = nn.functional.pad(batched, self.padding)
        if self.dims == 1:
            batched = batched.unsqueeze(2)
        size = [
            (batched.shape[2 + i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1 for i in (0, 1)
        ]
        if self.kernel == (1, 1) and self.stride == (1, 1):
            patches = batched.flatten(2)
        else:
            patches = nn.functional.unfold(batched, self.kernel, self.dilation, 0, self.stride)  # (B, C kh kw, H' W')
        y = self.linear(patches.mT.contiguous()).mT  # (B, O, H' W')
        y = y.reshape(*y.shape[:2], *size) if self.dims == 2 else y.reshape(*y.shape[:2], size[1])
        return y if x.ndim == self.dims + 2 else y.squeeze(0)

    def extra_repr(self) -> str:
        """Return the geometry for ``repr``."""
        return f"kernel={self.kernel}, stride={self.stride}, dilation={self.dilation}, padding={self.padding}"


def flat_linear(conv: nn.Conv1d | nn.Conv2d) -> nn.Linear:
    """Return a linear layer that shares the parameters of a convolution: (O, C * kernel)."""
    weight = conv.weight.detach().flatten(1)
    linear = nn.Linear(weight.shape[1], weight.shape[0], conv.bias is not None, device="meta")
    linear.register_parameter("weight", nn.Parameter(weight, requires_grad=conv.weight.requires_grad))
    if conv.bias is not None:
        linear.register_parameter("bias", conv._parameters["bias"])
    return linear


def dense_conv(layer: PatchLinear, linear: nn.Linear) -> nn.Conv1d | nn.Conv2d:
    """Return the convolution that a :class:`PatchLinear` stands for, with the weights of a linear layer.

    Raises
    ------
    ValueError
        If the padding differs between the two ends of a dimension.
    """
    kernel = layer.kernel[2 - layer.dims :]
    pads = layer.padding[::-1]  # pairs, the first dimension first
    if any(pads[2 * i] != pads[2 * i + 1] for i in range(layer.dims)):
        raise ValueError(f"padding must be the same at both ends, got {layer.padding}")
    kind: Any = nn.Conv1d if layer.dims == 1 else nn.Conv2d
    channels = linear.in_features // math.prod(kernel)
    geometry = layer.stride[2 - layer.dims :], tuple(pads[::2]), layer.dilation[2 - layer.dims :]
    conv: nn.Conv1d | nn.Conv2d = kind(
        channels, linear.out_features, kernel, *geometry, bias=linear.bias is not None, device="meta"
    )
    conv.weight = nn.Parameter(linear.weight.detach().view(linear.out_features, channels, *kernel))
    if linear.bias is not None:
        conv.bias = linear.bias
    return conv
