"""A linear layer with pruned and quantized weights, for inference and fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.watch import watched
from magicube_cutlass import autograd
from magicube_cutlass.autograd.gpu_rows import sparse_rows
from magicube_cutlass.autograd.integer import quantized, spmm_of
from magicube_cutlass.checks import check_tensor, is_transformed, transform_error
from magicube_cutlass.dispatch import cpu_linear
from magicube_cutlass.formats import generate
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.nn import linear_op, weight_version
from magicube_cutlass.nn.calibration import Calibrated
from magicube_cutlass.nn.calibration import calibrate as run_calibration
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.nn.layer_state import matrix_of, restore_dtypes, take_tensors
from magicube_cutlass.quantization.quant_tensor import QuantTensor

_STRUCTURE = ("row_offsets", "col_indices")
_PACKED = ("values", "scale")  # of a frozen layer
_OPTIONAL = ("act_scale", *_PACKED)
_EDITIONS = count(1)  # no two layers share one: a compiler may take one's graph for the other


class SparseQuantLinear(weight_version.WatchedWeight, Calibrated):
    """Linear layer with a quantized sparse weight: ``y = q(x) A^T + b``.

    A (out, in) is ``q(weight)`` at a pattern, in training and in evaluation; `weight` is the dense float master. The
    integers are made when the master has changed; writes through ``weight.data`` are not seen. Gradients are
    straight-through, and zero outside of the pattern, where the master keeps its values for a later :meth:`prune_`.
    :meth:`freeze` drops the master.

    Input (..., in) of float16, bfloat16, float32 or float64; output (..., out) of its dtype, contiguous on a GPU, else
    maybe a view with contiguous tokens. On a CPU, a forward pass without gradients is one call of the engine, which
    quantizes the input, and a weight with few zeros takes the dense kernel; both kernels give the same bits.

    Buffers: `row_offsets` and `col_indices`, the pattern; `act_scale`, () float32, after a calibration; `values` and
    `scale`, the integers of a frozen layer. The state dict holds tensors only; loading one restores pattern and
    options.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As for ``nn.Linear``.
    config : SparseQuantConfig, optional
        Options.

    Raises
    ------
    TypeError, ValueError
        As :class:`SparseQuantConfig` and :func:`magicube_cutlass.autograd.spmm`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> layer = mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(64, 32), sparsity=0.5)
    >>> layer(torch.randn(3, 64)).shape, layer.pattern.density
    (torch.Size([3, 32]), 0.5)
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    row_offsets: Tensor
    col_indices: Tensor
    act_scale: Tensor | None
    values: Tensor | None
    scale: Tensor | None
    _pattern: Pattern | None
    _matrix: SRBCRS | None  # the integers
    _made_of: tuple[Tensor, int] | None  # the weight and its version
    _version_id: str  # number of the integers; empty without any
    _number: int  # of the layer, for the operator

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: SparseQuantConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._begin(plain.weight, plain.bias, config or SparseQuantConfig(), None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        sparsity: float = 0.9,
        vector_length: int = 8,
        bits: int = 8,
        act_bits: int = 8,
        *,
        grad_bits: int | None = 16,
        mask: Tensor | Pattern | None = None,
        calibrate: Iterable[Tensor] | None = None,
        clip: float | str = "max",
    ) -> SparseQuantLinear:
        """Make a layer that shares the parameters of an ``nn.Linear``, pruned by magnitude or to a mask.

        Parameters
        ----------
        linear : nn.Linear
            Layer to convert.
        sparsity, vector_length, bits, act_bits, grad_bits
            As for :class:`SparseQuantConfig`.
        mask : Tensor or Pattern, shape (out, in), optional
            bool; whole vectors of it are stored, or a pattern; replaces `sparsity` and `vector_length`.
        calibrate : iterable, optional
            Inputs (..., in) for a static activation scale. Default: dynamic per-token scales.
        clip : float or {"max", "mse"}, default "max"
            As for :func:`magicube_cutlass.quantize`.

        Raises
        ------
        TypeError
            If `linear` is no ``nn.Linear``.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        config = SparseQuantConfig(sparsity, vector_length, bits, act_bits, grad_bits)
        layer._begin(linear.weight, linear.bias, config, mask)
        if calibrate is not None:
            run_calibration(layer, calibrate, clip=clip, progress=False)
        return layer.train(linear.training)

    def _begin(
        self, weight: Tensor, bias: nn.Parameter | None, config: SparseQuantConfig, mask: Tensor | Pattern | None
    ) -> None:
        if not isinstance(weight, nn.Parameter):
            raise TypeError(f"linear must have a parameter as its weight, got a {type(weight).__name__}")
        self.out_features, self.in_features = weight.shape
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        for name in (*_STRUCTURE, *_OPTIONAL):
            self.register_buffer(name, None)
        self.config = config
        self._number = linear_op.register(self)
        self.prune_(mask=mask)

    def prune_(self, sparsity: float | None = None, *, mask: Tensor | Pattern | None = None) -> None:
        """Select the stored vectors anew: the largest ones of the master, or a mask.

        Parameters
        ----------
        sparsity : float, optional
            Default: that of the config.
        mask : Tensor or Pattern, shape (out, in), optional
            Vectors to keep.

        Raises
        ------
        RuntimeError
            If the layer is frozen.
        ValueError
            For a mask of another shape.
        """
        if self.weight is None:
            raise RuntimeError("prune_ needs the master weight, which freeze() gave up")
        shape, v = (self.out_features, self.in_features), self.config.vector_length
        target = self.config.sparsity if sparsity is None else sparsity
        chosen = generate.prune(self.weight.detach(), target, v) if mask is None else mask
        if isinstance(chosen, Tensor):
            check_tensor("mask", chosen, dtype=torch.bool, ndim=2)
            chosen = Pattern.from_dense(chosen, v)
        if chosen.shape != shape:
            raise ValueError(f"mask must have shape {shape} like the weight, got {chosen.shape}")
        pattern = chosen.to(self.weight.device)
        self.row_offsets, self.col_indices = pattern.row_offsets, pattern.col_indices
        sparsity = target if mask is None else 1 - pattern.density
        self.config = replace(self.config, sparsity=sparsity, vector_length=pattern.vector_length)
        self._forget()
        self._pattern = pattern

    def _forget(self) -> None:
        """Drop what was derived from the tensors."""
        self._pattern = None
        self._matrix = None
        self._made_of = None
        self._version_id = ""
        linear_op.register_frozen(self)

    @property
    def pattern(self) -> Pattern:
        """Stored vectors of the weight."""
        if self._pattern is None:
            shape = (self.out_features, self.in_features)
            self._pattern = Pattern(shape, self.config.vector_length, self.row_offsets, self.col_indices)
        return self._pattern

    def matrix(self) -> SRBCRS:
        """Return the integers of the weight, made again if the master has changed."""
        try:  # as self.weight, without two calls of Python
            weight = self._parameters["weight"]
        except KeyError:  # a parametrization
            weight = self.weight
        version = 0 if weight is None else weight_version.weight_version(weight)
        made_of, matrix = self._made_of, self._matrix
        same = made_of is not None and made_of[0] is weight and made_of[1] == version
        if matrix is not None and (weight is None or same):
            return matrix
        if weight is not None and not torch.compiler.is_compiling() and is_transformed(weight):
            raise transform_error("weight")  # before it becomes a part of the layer
        if weight is None:
            matrix = self._frozen_matrix()
        else:
            values = autograd.vectors_at(weight.detach(), self.pattern)
            matrix = autograd.compress(values, self.pattern, bits=self.config.bits)
            self._made_of = (weight, version)
        self._matrix = matrix
        self._version_id = str(next(_EDITIONS))
        return matrix

    def _frozen_matrix(self) -> SRBCRS:
        assert self.values is not None
        linear_op.register_frozen(self)
        return matrix_of(self.pattern, self.values, self.scale, self.config.bits)

    @watched("magicube_cutlass.nn.SparseQuantLinear.forward", traces=False)
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._compiled(x)
        matrix, parameters, act_scale = self.matrix(), self._parameters, self._buffers["act_scale"]
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            weight, bias = self.weight, self.bias
        learns = torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        )
        if x.is_cuda:
            self._check_input(x)
            if is_transformed(x):
                raise transform_error("x")
            if learns:
                return linear_op.run_gpu_product(x, weight, bias, act_scale, matrix, self.config)
            return sparse_rows(matrix, x, bias, act_scale, self.config.act_bits, self.config.grad_bits)
        record = cpu_linear.record_of(matrix, x, bias, self.config.act_bits, act_scale, learns)
        if isinstance(record, cpu_linear.LinearRecord):
            return record(x, act_scale, matrix.scale, bias)
        if record is not None:
            return linear_op.run_product(x, weight, bias, act_scale, matrix, record, self.config.grad_bits)
        self._check_input(x)
        if is_transformed(x):
            raise transform_error("x")
        return self._product(x, matrix, x.is_contiguous())

    def _check_input(self, x: Tensor) -> None:
        """Raise `ValueError` unless `x` has the features of the layer."""
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x must have {self.in_features} features, got shape {tuple(x.shape)}")

    def _compiled(self, x: Tensor) -> Tensor:
        """As :meth:`forward`, in a graph."""
        self._check_input(x)
        tensors, rows = (x, self.weight, self.bias), x.reshape(-1, self.in_features)
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
            y = linear_op.sparse_linear(rows, self.weight, self.bias, self._number).mT
            return y.view(*x.shape[:-1], self.out_features)
        exports = torch.compiler._is_exporting_flag  # torch 2.11 folds is_exporting() to True wherever it compiles
        if exports or self.scale is None:  # looking at the edition makes the compiler guard it
            if self._version_id == "" or self._matrix is None:
                raise RuntimeError(
                    "a SparseQuantLinear needs its integers before it is compiled: call eval(), or run it"
                )
            if exports:
                return self._product(x, self._matrix, False)
            y = linear_op.sparse_linear_rows(rows, self.bias, self._number)
        else:
            y = linear_op.sparse_frozen_rows(rows, self.scale, self.bias, self.act_scale, self.config.act_bits)
        return y.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor, matrix: SRBCRS, has_declined: bool) -> Tensor:
        """The output by products of quantized operands; `has_declined`: the CPU's one call does not take `x`."""
        y = self._multiply(x.reshape(-1, self.in_features), matrix, has_declined)
        return y.mT.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Tensor, matrix: SRBCRS, has_declined: bool = False) -> Tensor:
        """Output (out, tokens) for `x` (tokens, in) and the integers of the weight."""
        values, config = None, self.config
        if torch.is_grad_enabled() and self.weight is not None and self.weight.requires_grad:
            values = autograd.vectors_at(self.weight, self.pattern)
        return spmm_of(
            matrix, x.mT, values, self.bias, config.act_bits, 0, self.act_scale, config.grad_bits, not has_declined
        )

    def _quantize(self, x: Tensor) -> QuantTensor:
        """Integers (in, tokens) of `x` (tokens, in) as the product takes them."""
        axis = 0 if self.act_scale is None else None
        return quantized(x.mT, self.config.act_bits, axis, self.act_scale)

    def freeze(self) -> SparseQuantLinear:
        """Drop the master weight and keep the integers, for inference; return the layer.

        The bias then needs no gradient.
        """
        if self.weight is not None:
            matrix = self.matrix()
            self.values, self.scale, self.weight = matrix.values, matrix.scale, None
            linear_op.register_frozen(self)
            self._made_of = None
            if self.bias is not None:
                self.bias.requires_grad_(False)
        return self

    @property
    def frozen(self) -> bool:
        """Whether the master weight was dropped."""
        return self.weight is None

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the tensors of the frozen layer."""
        tensors = (self.row_offsets, self.col_indices, self.bias, self.act_scale)
        matrix = self.matrix()
        scale = 0 if matrix.scale is None else matrix.scale.nbytes
        return sum(each.nbytes for each in tensors if each is not None) + matrix.values.nbytes + scale

    def train(self, mode: bool = True) -> SparseQuantLinear:
        """Set the mode; evaluation makes the integers at once."""
        super().train(mode)
        if not mode:
            self.matrix()
        return self

    def get_extra_state(self) -> Tensor:
        """Return the pattern's kind and the options as a tensor, for the state dict."""
        return self.config.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self.config = SparseQuantConfig.from_tensor(state)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Restore sizes and options before the tensors; the state of a plain linear layer keeps the pattern."""
        errors: list[str] = arguments[-1]
        if prefix + "row_offsets" in state_dict:
            try:
                self._check_state(state_dict, prefix)
            except (TypeError, ValueError) as error:  # nothing was assigned
                errors.append(f"{prefix}pattern: {error}")
                return
            self._take_kind(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._forget()

    def _take_kind(self, state_dict: Any, prefix: str) -> None:
        take_tensors(self, state_dict, prefix, (*_STRUCTURE, *_OPTIONAL), self.row_offsets.device)

    def _check_state(self, state_dict: Any, prefix: str) -> None:
        """Raise unless pattern, options and integers of a state fit each other and this layer."""
        stored = {name: state_dict.get(prefix + name) for name in (*_STRUCTURE, *_PACKED, "_extra_state", "weight")}
        options = stored["_extra_state"]
        config = self.config if options is None else SparseQuantConfig.from_tensor(options)
        shape, v = (self.out_features, self.in_features), config.vector_length
        pattern = Pattern(shape, v, stored["row_offsets"], stored["col_indices"])
        pattern.check_format(full=True)
        if stored["weight"] is None and stored["values"] is not None:
            matrix_of(pattern, stored["values"], stored["scale"], config.bits).check_format(full=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseQuantLinear:
        scales = {name: getattr(self, name) for name in ("scale", "act_scale")}
        super()._apply(fn, recurse)
        restore_dtypes(self, scales)
        self._forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pattern": None, "_matrix": None, "_made_of": None, "_version_id": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = linear_op.register(self)
        linear_op.register_frozen(self)

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        config, acts = self.config, "dynamic" if self.act_scale is None else "static"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"sparsity={config.sparsity:.3g}, vector_length={config.vector_length}, bits={config.bits}, "
            f"act_bits={config.act_bits} {acts}, frozen={self.frozen}"
        )
