"""The tensors of a layer with a dense quantized weight: state dicts, moves, copies, and empty ones to load into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cute_kernels.explanation import Explanation
from cute_kernels.floats import packed_bytes
from magicube_cutlass.nn.calibration import Calibrated
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense import linear_op
from magicube_cutlass.nn.dense.product import DenseProduct
from magicube_cutlass.nn.layer_state import restore_dtypes, take_tensors
from magicube_cutlass.quantization.float_tensor import RECIPES

WEIGHT_BUFFERS = ("qweight", "scale", "minimum", "tensor_scale")  # of a frozen layer
OPTIONAL_BUFFERS = (*WEIGHT_BUFFERS, "act_scale", "smooth")
_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def weight_shapes(out_features: int, in_features: int, config: QuantConfig) -> _Shapes:
    """Return shape and dtype of the buffers of a frozen weight.

    Examples
    --------
    >>> weight_shapes(2, 64, QuantConfig("int4", group_size=32))["scale"]
    ((2, 2), torch.float32)
    """
    m, k = out_features, in_features
    if config.is_integer:
        groups = 1 if config.group_size is None else -(-k // config.group_size)
        width, dtype = (k, torch.int8) if config.bits == 8 else ((k + 1) // 2, torch.uint8)
        found: _Shapes = {"qweight": ((m, width), dtype), "scale": ((m, groups), torch.float32)}
        return found if config.symmetric else {**found, "minimum": ((m, groups), torch.float32)}
    name, block, scale_dtype = RECIPES.get(config.weight, (config.weight, None, "float32"))
    found = {"qweight": ((m, packed_bytes(k, name)), torch.uint8)}
    if block is None:
        return {**found, "scale": ((m, 1), torch.float32)}
    if isinstance(block, tuple):
        return {**found, "scale": ((-(-m // block[0]), -(-k // block[1])), torch.float32)}
    found["scale"] = ((m, -(-k // block)), torch.uint8)
    return {**found, "tensor_scale": ((), torch.float32)} if scale_dtype == "e4m3" else found


class JointProduct(Protocol):
    """One product for several layers, see :func:`magicube_cutlass.nn.fuse_projections`."""

    is_current: bool
    gates_results: bool  # whether a kernel does, see fuse_glu

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Return the output of a layer."""
        ...

    def refresh(self) -> None:
        """Take over what the layers hold now."""
        ...

    def explain(self, rows: int | None) -> Explanation:
        """Report the product."""
        ...


class QuantState(Calibrated):
    """Buffers of a quantized weight beside a float master, which a frozen layer lacks."""

    config: QuantConfig  # type: ignore[assignment]
    in_features: int
    out_features: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    qweight: Tensor | None
    scale: Tensor | None
    minimum: Tensor | None
    tensor_scale: Tensor | None
    act_scale: Tensor | None
    smooth: Tensor | None
    like: Tensor | None  # (0,), of the dtype of outputs for int8 rows
    _product: DenseProduct | None
    _made_of: tuple[int, int, int] | None  # identities of weight and smooth scale, version of the weight
    _made_by: tuple[Tensor | None, Tensor | None] | None  # so that no other tensor takes the identities
    _number: int
    _joint: JointProduct | None = None  # that multiplies for this layer and others
    _place: int  # in it
    _gated_by: JointProduct | None = None  # whose gated results are the rows, see fuse_glu
    _next: QuantState | None = None  # the layer that reads the output, see fuse_quantization

    def _begin(self, weight: Tensor | None, bias: Tensor | None, config: QuantConfig, shape: tuple[int, int]) -> None:
        if weight is not None and not isinstance(weight, nn.Parameter):
            raise TypeError(f"linear must have a parameter as its weight, got a {type(weight).__name__}")
        self.out_features, self.in_features = shape
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)  # type: ignore[arg-type]
        for name in OPTIONAL_BUFFERS:
            self.register_buffer(name, None)
        self.register_buffer("like", None, persistent=False)
        self.config = config
        self._number = linear_op.register_layer(self)  # type: ignore[arg-type]
        self._forget()

    def _forget(self) -> None:
        """Drop what was derived from the tensors."""
        self._product = self._made_of = self._made_by = None
        for joint in (self._joint, self._gated_by):
            if joint is not None:
                joint.is_current = False

    @property
    def takes_integers(self) -> bool:
        """Whether rows may be int8, ``x / smooth`` by the static scale: frozen int8 layers with one, without groups."""
        plain = self.config.kind == ("int8", "int8", None) and self._joint is None
        return plain and self.qweight is not None and self.act_scale is not None

    @property
    def reads_kernel(self) -> bool:
        """Whether a kernel of this library writes the rows, so that a compiler has nothing to fuse with them."""
        joint = self._gated_by
        return joint is not None and joint.is_current and joint.gates_results and self.smooth is None

    def _out_scale(self) -> Tensor | None:
        """The scale of the integers that the next layer takes, if it does."""
        reader = self._next
        return reader.act_scale if reader is not None and reader.takes_integers and reader.smooth is None else None

    def empty_weight(self, device: torch.device | str | None = None) -> None:
        """Drop the master weight for empty buffers of a frozen layer, to be loaded."""
        self.weight = None
        shapes = weight_shapes(self.out_features, self.in_features, self.config)
        for name in WEIGHT_BUFFERS:
            shape, dtype = shapes.get(name, (None, torch.float32))
            setattr(self, name, None if shape is None else torch.empty(shape, dtype=dtype, device=device))
        self._forget()

    @property
    def stored_config(self) -> QuantConfig:
        """The options that files hold: without an activation that :func:`fuse_activations` moved into the layer."""
        return replace(self.config, activation=None) if "_fused" in self.__dict__ else self.config

    def get_extra_state(self) -> Tensor:
        """Return the options as a tensor, for the state dict."""
        return self.stored_config.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        found = QuantConfig.from_tensor(state)
        kept = self.config.activation if "_fused" in self.__dict__ else found.activation
        self.config = replace(found, activation=kept)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Copy rows of a joint weight: files of safetensors refuse parts of a storage."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in (*WEIGHT_BUFFERS, "bias") if self._joint is not None else ():
            if destination.get(prefix + name) is not None:
                destination[prefix + name] = destination[prefix + name].detach().clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Restore the options before the tensors; a plain linear layer's state goes to the master."""
        errors: list[str] = arguments[-1]
        if prefix + "_extra_state" in state_dict:
            try:
                self._check_state(state_dict, prefix)
            except (TypeError, ValueError) as error:  # nothing was assigned
                errors.append(f"{prefix}weight: {error}")
                return
            self._take_kind(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._forget()

    def _take_kind(self, state_dict: Any, prefix: str) -> None:
        kept = next((each for each in (self.weight, self.qweight, self.bias) if each is not None), None)
        device = None if kept is None else kept.device
        take_tensors(self, state_dict, prefix, OPTIONAL_BUFFERS, device)

    def _check_state(self, state_dict: Any, prefix: str) -> None:
        """Raise unless options and tensors of a state fit each other and this layer."""
        config = QuantConfig.from_tensor(state_dict[prefix + "_extra_state"])
        if prefix + "weight" in state_dict:
            return
        for name, (shape, dtype) in weight_shapes(self.out_features, self.in_features, config).items():
            found = state_dict.get(prefix + name)
            if found is None or tuple(found.shape) != shape or found.dtype != dtype:
                got = "none" if found is None else f"{found.dtype} of {tuple(found.shape)}"
                raise ValueError(f"{name} must be {dtype} of shape {shape}, got {got}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantState:
        kept = {name: getattr(self, name) for name in OPTIONAL_BUFFERS}
        super()._apply(fn, recurse)
        restore_dtypes(self, kept)
        self._forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_product": None, "_made_of": None, "_made_by": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = linear_op.register_layer(self)  # type: ignore[arg-type]
