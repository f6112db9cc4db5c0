"""Adapters of PEFT beside the layers of this library: LoRA trains, the quantized weight stays."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.linear import SparseQuantLinear

__all__ = ["LoraQuantLinear", "with_quantized_layers"]

_DEVICE_NAME = "W_q"  # where PEFT looks for the device of a layer without `weight`


class LoraQuantLinear(nn.Module, LoraLayer):
    """A quantized layer plus low-rank adapters in float: ``y = base(x) + scaling * B(A(dropout(x)))``.

    PEFT makes it; adapters cannot be merged into the integers.
    """

    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    scaling: Any
    active_adapters: Any
    update_layer: Any

    def __init__(
        self,
        base_layer: QuantLinear | SparseQuantLinear,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(base_layer, QuantLinear) and base_layer.config.activation is not None:
            raise ValueError(f"base_layer must have no activation, which follows the adapters, got {base_layer}")
        if config.use_dora:
            raise ValueError("use_dora must be False: it reads float weights")
        LoraLayer.__init__(self, base_layer)
        if isinstance(base_layer, SparseQuantLinear):
            base_layer.__dict__[_DEVICE_NAME] = base_layer.row_offsets
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, (QuantLinear, SparseQuantLinear))
        return module.in_features, module.out_features

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        base: Any = self.base_layer
        y: Tensor = base(x)
        if self.disable_adapters:
            return y
        for name in self.active_adapters:
            if name in self.lora_A:
                first, second = self.lora_A[name], self.lora_B[name]
                added = second(first(self.lora_dropout[name](x.to(first.weight.dtype)))) * self.scaling[name]
                y = y + added.to(y.dtype)
        return y

    def merge(self, *arguments: Any, **options: Any) -> None:
        """Raise: integers take no adapters.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError("adapters cannot be merged into integers; call mc.nn.to_dense(model) first")

    def unmerge(self) -> None:
        """Do nothing: nothing was merged."""


def with_quantized_layers(config: LoraConfig) -> LoraConfig:
    """Return the config, which now takes :class:`QuantLinear` and :class:`SparseQuantLinear` layers.

    Parameters
    ----------
    config : peft.LoraConfig
        Changed in place.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from peft import get_peft_model
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    >>> report = mc.convert(model, mc.nn.QuantConfig("int4", group_size=32), freeze=True)
    >>> adapted = get_peft_model(model, with_quantized_layers(LoraConfig(target_modules=["0"], r=4)))
    >>> adapted(torch.randn(2, 64)).shape
    torch.Size([2, 32])
    """
    config._register_custom_module({QuantLinear: LoraQuantLinear, SparseQuantLinear: LoraQuantLinear})
    return config
