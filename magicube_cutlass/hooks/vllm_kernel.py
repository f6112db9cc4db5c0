"""The engine as an int8 linear kernel of vLLM."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import current_platform

from cute_kernels.cpu import extension
from magicube_cutlass.nn.dense.linear_op import quant_linear

__all__ = ["MagicubeInt8Kernel"]


class MagicubeInt8Kernel(Int8ScaledMMLinearKernel):
    """``q(x) W^T * scales + bias`` with int8 weights per row, exact integer sums, rows quantized in the call."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return whether this machine runs the kernel, or the reason why not."""
        if not current_platform.is_cpu():
            return False, "requires CPU."
        return (True, None) if extension.available() else (False, "requires the engine of magicube_cutlass.")

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether the kernel has this scheme, or the reason why not."""
        return (True, None) if c.input_symmetric else (False, "requires symmetric activations.")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring the scales of a loaded layer into the form of the engine: one per row, and one of the input."""
        weight_name, scale_name, input_name, _, _ = self.layer_param_names
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name).float()
        if not self.config.is_channelwise and scale.numel() > 1:  # one per part of a fused layer
            widths = scale.new_tensor(layer.logical_widths).long()
            scale = scale.reshape(-1).repeat_interleave(widths)
        scale = scale.reshape(-1, 1).expand(weight.shape[0], 1)
        replace_parameter(layer, weight_name, nn.Parameter(weight.data.contiguous(), requires_grad=False))
        replace_parameter(layer, scale_name, nn.Parameter(scale.contiguous(), requires_grad=False))
        if self.config.is_static_input_scheme:
            largest = getattr(layer, input_name).float().max()
            replace_parameter(layer, input_name, nn.Parameter(largest, requires_grad=False))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output (..., out) for `x` (..., in)."""
        weight, scale, input_scale, _, _ = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        y = quant_linear(rows, weight, scale, None, None, bias, input_scale, "int8", 0, x.shape[-1], "int8")
        found: Tensor = y.view(*x.shape[:-1], weight.shape[0])
        return found
