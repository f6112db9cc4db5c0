"""What became of the layers of a model: the result of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from magicube_cutlass.nn.auto_plan import PlanChoice
from magicube_cutlass.nn.config import QuantConfig, SparseQuantConfig

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ConversionReport", "ConversionRow"]


@dataclass(frozen=True)
class ConversionRow:
    """Result for one layer: converted if `note` is empty, else left for this reason.

    Attributes
    ----------
    name : str
        Qualified name.
    shape : tuple of int
        Of the weight; (out, in) of a linear layer.
    config : SparseQuantConfig, QuantConfig or None
        Options of a converted layer.
    bytes_before, bytes_after : int
        Bytes of the parameters, and of the frozen layer.
    note : str
        Why the layer was left.
    kind : str
        ``"linear"``, ``"conv"``, ``"embedding"``, or the class of another module with a weight.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> report = mc.convert(torch.nn.Sequential(torch.nn.Linear(64, 8)), {"0": None})
    >>> report.rows[0].name, report.rows[0].shape, report.rows[0].note
    ('0', (8, 64), "left, as '0' says")
    """

    name: str
    shape: tuple[int, ...]
    config: SparseQuantConfig | QuantConfig | None
    bytes_before: int
    bytes_after: int
    note: str = ""
    kind: str = "linear"


@dataclass(frozen=True)
class ConversionReport:
    """Result of :func:`convert`; ``print`` shows a table.

    Attributes
    ----------
    rows : tuple of ConversionRow
        One per name of a module with a weight.
    model_bytes : int
        Bytes of all parameters and buffers before the conversion.
    without_fast_path : tuple of str
        ``nn.TransformerEncoderLayer`` modules whose fast path in torch was turned off: it reads the dense weights.
    predicted : PlanChoice or None
        Loss and predicted times of a plan that was searched.

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
    predicted: PlanChoice | None = None

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

        rows = [row for row in self.rows if len(row.shape) > 1]

        table = Table(title="layers", caption=self._summary())
        for name in ("layer", "weight", "format", "bytes before", "after", "note"):
            left = name in ("layer", "note", "format")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for row in rows:
            after = "" if row.note else f"{row.bytes_after:,}"
            size = " x ".join(map(str, row.shape))
            table.add_row(row.name, size, _described(row.config), f"{row.bytes_before:,}", after, row.note)
        return table

    def _summary(self) -> str:
        rest = self.model_bytes - self.bytes_before
        matrices = [row for row in self.rows if len(row.shape) > 1]
        after = f"{self.model_bytes:,} to {rest + self.bytes_after:,}"
        return (
            f"{len(self.converted)} of {len(matrices)} layers replaced, {self.bytes_before:,} to {self.bytes_after:,} "
            f"bytes once frozen; the model {after}{self._fast_path_note()}{self._plan_note()}"
        )

    def _fast_path_note(self) -> str:
        names = ", ".join(self.without_fast_path)
        return f"; torch's fast path is off in {names}: it would read dense weights" if names else ""

    def _plan_note(self) -> str:
        found = self.predicted
        if found is None:
            return ""
        return (f"; predicted {found.float_microseconds:,.0f} to {found.microseconds:,.0f} us a batch, "
                f"loss {found.loss:.3g}")  # fmt: skip

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=120)
        console.print(self)
        file = console.file
        assert isinstance(file, StringIO)
        return file.getvalue()


def _described(config: SparseQuantConfig | QuantConfig | None) -> str:
    """A config in a few words."""
    if config is None:
        return ""
    if isinstance(config, SparseQuantConfig):
        return f"{config.sparsity:.3f} zeros, {config.vector_length} x 1, {config.bits}-{config.act_bits}"
    group = "" if config.group_size is None else f" g{config.group_size}"
    return f"{config.weight}{group}{'' if config.symmetric else ' with minimum'}, {config.act}"
