"""Models of transformers: ``from_pretrained(folder, quantization_config=MagicubeConfig())``, saved bit for bit.

Importing this module registers the quantizer. A saved model needs it before ``from_pretrained``: without it,
transformers refuses the file, since each quantized layer stores an empty tensor under the name of the float weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from magicube_cutlass.hooks.layer_records import config_from_dict, config_to_dict, empty_layer, record, stored_config
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.convert import convert
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.nn.weight_modules import LayerConfig, set_module, to_dense

__all__ = ["MagicubeConfig", "MagicubeQuantizer", "adopt"]

METHOD = "magicube"
_LAYERS = (QuantLinear, SparseQuantLinear)


@register_quantization_config(METHOD)
class MagicubeConfig(QuantizationConfigMixin):
    """How :mod:`transformers` quantizes a model as it loads it.

    Parameters
    ----------
    plan : QuantConfig, SparseQuantConfig, mapping or None
        For all linear layers, or per pattern of names, as for :func:`magicube_cutlass.convert`. Default: int8.
    skip : sequence of str, default ()
        Patterns of layers that stay in float; they go first.
    freeze : bool, default True
        Drop the float weights. False: keep them, for quantization-aware training; they are what is saved.
    layers : mapping, optional
        Written when a model is saved: its quantized layers.

    Raises
    ------
    ValueError
        For a plan of another form.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> MagicubeConfig(mc.nn.QuantConfig("int4", group_size=32)).to_dict()["plan"]["*"]["weight"]
    'int4'
    """

    def __init__(
        self,
        plan: LayerConfig | Mapping[str, Any] | None = None,
        skip: Sequence[str] = (),
        freeze: bool = True,
        layers: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD
        chosen = plan if isinstance(plan, Mapping) else {"*": plan or QuantConfig()}
        self.plan = {name: config_to_dict(config_from_dict(each)) for name, each in chosen.items()}
        self.skip, self.freeze = list(skip), freeze
        self.layers = None if layers is None else dict(layers)

    def patterns(self) -> dict[str, LayerConfig | None]:
        """Return the plan of :func:`magicube_cutlass.convert`."""
        return {**dict.fromkeys(self.skip), **{name: config_from_dict(each) for name, each in self.plan.items()}}


@register_quantizer(METHOD)
class MagicubeQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a model with a :class:`MagicubeConfig`."""

    requires_calibration: ClassVar[bool] = False
    quantization_config: MagicubeConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Put empty layers in the place of those that a saved model has quantized."""
        if not self.pre_quantized or self.quantization_config.layers is None:
            return
        for name, stored in self.quantization_config.layers.items():
            set_module(model, name, empty_layer(stored, model.dtype, "meta"))
        # the empty tensors that stop other readers
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *(f"{name.replace('.', '[.]')}[.]weight$" for name in self.quantization_config.layers),
        }

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Quantize a float model; check the layers of a quantized one."""
        if self.pre_quantized and self.quantization_config.layers is not None:
            for layer in _quantized(model).values():
                layer.weight = None  # tied to that of an embedding
                layer._forget()
            return
        self._convert(model)

    def _convert(self, model: Any) -> None:
        config = self.quantization_config
        convert(model, config.patterns(), freeze=config.freeze, progress=False)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if isinstance(head, _LAYERS) and config.freeze:
            _untie_head(model)
        self._record(model)

    def _record(self, model: nn.Module) -> None:
        """Write into the config what the frozen layers of a model are."""
        frozen = {name: record(layer) for name, layer in _quantized(model).items() if layer.frozen}
        self.quantization_config.layers = frozen or None

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Add an empty tensor named as the float weight of each frozen layer."""
        self._record(model)
        state = model.state_dict()
        for name, layer in _quantized(model).items():
            if layer.frozen:
                state[f"{name}.weight"] = torch.empty(0, device="cpu")
            else:
                del state[f"{name}._extra_state"]  # the config has the options
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        to_dense(model)
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        """Whether the model can be saved: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters beside the layers can be trained: yes, gradients pass through frozen layers."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the weights themselves can be trained."""
        return not self.quantization_config.freeze

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` takes the layers: yes."""
        return True


def _quantized(model: nn.Module) -> dict[str, QuantLinear | SparseQuantLinear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, _LAYERS)}


def adopt(model: Any) -> Any:
    """Make ``save_pretrained`` of a model keep the frozen layers that :func:`magicube_cutlass.convert` put into it.

    Without this, transformers loads such a file into float layers with random weights. For models that are pruned,
    calibrated or read from other files before they are saved; :class:`MagicubeConfig` does it itself.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With frozen layers.

    Returns
    -------
    transformers.PreTrainedModel
        `model`.

    Raises
    ------
    ValueError
        If no layer is frozen, or some are not.
    """
    layers = _quantized(model)
    if not layers or not all(layer.frozen for layer in layers.values()):
        raise ValueError(f"model must have frozen layers only, got {sum(each.frozen for each in layers.values())} "
                         f"of {len(layers)}; use convert(..., freeze=True)")  # fmt: skip
    if isinstance(model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None, _LAYERS):
        _untie_head(model)
    quantizer = MagicubeQuantizer(MagicubeConfig({name: stored_config(layer) for name, layer in layers.items()}))
    quantizer._record(model)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.config.quantization_config = quantizer.quantization_config
    return model


def _untie_head(model: Any) -> None:
    """Have the model forget that its head shares the weight of its embedding: a frozen head has integers of its own."""
    if getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
