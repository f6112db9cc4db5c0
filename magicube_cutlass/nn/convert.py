"""Conversion of the linear layers of a model, selected by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import nn

from magicube_cutlass.nn.calibration import calibrate as run_calibration
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.nn.linear import SparseQuantLinear

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ConversionReport", "ConversionRow", "LayerConfigs", "convert"]

LayerConfigs = SparseQuantConfig | Mapping[str, SparseQuantConfig | None] | None


@dataclass(frozen=True)
class ConversionRow:
    """Result for one layer: converted if `note` is empty, else left for this reason.

    Attributes
    ----------
    name : str
        Qualified name.
    shape : tuple of int
        (out, in).
    config : SparseQuantConfig or None
        Options of a converted layer.
    bytes_before, bytes_after : int
        Bytes of the parameters, and of the frozen layer.
    note : str
        Why the layer was left.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> report = mc.convert(torch.nn.Sequential(torch.nn.Linear(64, 8)), {"0": None})
    >>> report.rows[0].name, report.rows[0].shape, report.rows[0].note
    ('0', (8, 64), "left, as '0' says")
    """

    name: str
    shape: tuple[int, int]
    config: SparseQuantConfig | None
    bytes_before: int
    bytes_after: int
    note: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """Result of :func:`convert`; ``print`` shows a table.

    Attributes
    ----------
    rows : tuple of ConversionRow
        One per name of a linear layer.
    model_bytes : int
        Bytes of all parameters and buffers before the conversion.
    without_fast_path : tuple of str
        ``nn.TransformerEncoderLayer`` modules whose fast path in torch was turned off: it reads the dense weights.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> report = mc.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    >>> report.converted, report.bytes_before > report.bytes_after
    (('0', '1'), True)
    """

    rows: tuple[ConversionRow, ...]
    model_bytes: int  # of all parameters and buffers before
    without_fast_path: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the converted layers."""
        return tuple(row.name for row in self.rows if not row.note)

    @property
    def bytes_before(self) -> int:
        """Bytes of the converted layers before."""
        return sum(row.bytes_before for row in self.rows if not row.note)

    @property
    def bytes_after(self) -> int:
        """Bytes of the converted layers once frozen."""
        return sum(row.bytes_after for row in self.rows if not row.note)

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title="linear layers", caption=self._summary())
        for name in ("layer", "out x in", "sparsity", "vectors", "bits", "bytes before", "after", "note"):
            left = name in ("layer", "note")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for row in self.rows:
            config = row.config
            chosen = ["", "", ""]
            if config is not None:
                chosen = [f"{config.sparsity:.3f}", f"{config.vector_length} x 1", f"{config.bits}-{config.act_bits}"]
            after = "" if row.note else f"{row.bytes_after:,}"
            size = f"{row.shape[0]} x {row.shape[1]}"
            table.add_row(row.name, size, *chosen, f"{row.bytes_before:,}", after, row.note)
        return table

    def _summary(self) -> str:
        rest = self.model_bytes - self.bytes_before
        return (
            f"{len(self.converted)} of {len(self.rows)} layers replaced, {self.bytes_before:,} to {self.bytes_after:,} "
            f"bytes once frozen; the model {self.model_bytes:,} to {rest + self.bytes_after:,}{self._fast_path_note()}"
        )

    def _fast_path_note(self) -> str:
        names = ", ".join(self.without_fast_path)
        return f"; torch's fast path is off in {names}: it would read dense weights" if names else ""

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=120)
        console.print(self)
        file = console.file
        assert isinstance(file, StringIO)
        return file.getvalue()


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def _config_of(name: str, config: LayerConfigs) -> tuple[str | None, SparseQuantConfig | None]:
    """First pattern that matches `name`, and its config."""
    if not isinstance(config, Mapping):
        return "*", config or SparseQuantConfig()
    for pattern, choice in config.items():
        if fnmatchcase(name, pattern):
            return pattern, choice
    return None, None


def convert(
    model: nn.Module,
    config: LayerConfigs = None,
    *,
    calibrate: Iterable[Any] | None = None,
    clip: float | str = "max",
    freeze: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Replace the ``nn.Linear`` layers of a model, in place, by :class:`SparseQuantLinear` layers.

    On an AVX2 machine each of these takes the sparse or the dense int8 kernel, whichever is predicted to be faster for
    its number of tokens.

    Parameters
    ----------
    model : nn.Module
        A layer with several names stays one layer. Subclasses of ``nn.Linear`` are left: other modules may read their
        weights.
    config : SparseQuantConfig, mapping or None
        For all layers; or per pattern of qualified names as in ``fnmatch``, of which the first match counts:
        ``{"head": None, "encoder.*.fc?": SparseQuantConfig(bits=4)}``. None, or no match, leaves a layer.
    calibrate : iterable, optional
        Inputs for static activation scales, see :func:`magicube_cutlass.nn.calibrate`.
    clip : float or {"max", "mse"}, default "max"
        As for :func:`magicube_cutlass.nn.calibrate`.
    freeze : bool, default False
        Drop the master weights.
    progress : bool, default True
        Show a progress bar of the calibration.

    Returns
    -------
    ConversionReport
        Each linear layer with its bytes before and after.

    Raises
    ------
    TypeError
        If `model` is a linear layer itself, which cannot be replaced in place.
    ValueError
        For a pattern that matches no layer.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> mc.convert(model, {"0": mc.nn.SparseQuantConfig(sparsity=0.9)}).converted
    ('0',)
    """
    if isinstance(model, nn.Linear):
        raise TypeError("model must have linear layers inside, got one itself: SparseQuantLinear.from_linear(model)")
    total, rows = _bytes(model), []
    found = [(name, each) for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, nn.Linear)]
    chosen = {name: _config_of(name, config) for name, _ in found}
    fitting = {pattern for pattern, _ in chosen.values()}
    if missing := [each for each in config if each not in fitting] if isinstance(config, Mapping) else []:
        names = ", ".join(chosen) or "none"
        raise ValueError(f"config must name linear layers, got {missing[0]!r}, the first to fit none of: {names}")
    first: dict[nn.Linear, tuple[str | None, SparseQuantConfig | None]] = {}
    for name, layer in found:  # all names of a layer get what the first one with a pattern gets
        if chosen[name][0] is not None:
            first.setdefault(layer, chosen[name])
    made: dict[nn.Linear, SparseQuantLinear] = {}
    for name, layer in found:
        pattern, choice = first.get(layer, (None, None))
        if choice is None:
            rows.append(_left(name, layer, "no pattern fits" if pattern is None else f"left, as {pattern!r} says"))
        elif type(layer) is not nn.Linear:
            rows.append(_left(name, layer, f"left: a {type(layer).__name__}"))
        elif layer in made:
            _replace(model, name, made[layer])
            rows.append(_left(name, layer, "the same layer again"))
        else:
            made[layer] = SparseQuantLinear.from_linear(layer, **asdict(choice))
            _replace(model, name, made[layer])
            rows.append(_row(name, layer, made[layer]))
    if calibrate is not None:
        run_calibration(model, calibrate, clip=clip, progress=progress)
    if freeze:
        for new in made.values():
            new.freeze()
    return ConversionReport(tuple(rows), total, tuple(_leave_fast_paths(model)))


def _leave_fast_paths(model: nn.Module) -> Iterator[str]:
    """Turn off the fast path of encoder layers with a converted layer; yield their names.

    In evaluation without gradients ``nn.TransformerEncoderLayer`` hands ``linear1.weight`` to a kernel of its own: it
    would run the dense master, and fails for a frozen layer.
    """
    for name, each in model.named_modules():
        if isinstance(each, nn.TransformerEncoderLayer) and any(
            isinstance(layer, SparseQuantLinear) for layer in (each.linear1, each.linear2)
        ):
            each.activation_relu_or_gelu = 0  # what torch looks at before it takes the fast path
            yield name or type(each).__name__


def _left(name: str, layer: nn.Linear, note: str) -> ConversionRow:
    size = _bytes(layer)
    return ConversionRow(name, (layer.out_features, layer.in_features), None, size, size, note)


def _row(name: str, layer: nn.Linear, new: SparseQuantLinear) -> ConversionRow:
    shape = (new.out_features, new.in_features)
    return ConversionRow(name, shape, new.config, _bytes(layer), new.compressed_bytes)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
