"""Base of the SDDMM kernel configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cute_kernels import atoms
from cute_kernels.dtypes import ElementType, num_digits
from cute_kernels.jit.codegen import OUT_TYPES
from cute_kernels.jit.kernel import Kernel
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.sparse_config import SparseConfig


@dataclass(frozen=True)
class SampleConfig(SparseConfig):
    """Config of an SDDMM kernel: base of ``SddmmConfig`` and ``SddmmPanelConfig``.

    ``S = row_scale * col_scale * (X @ Y^T)`` at the vectors of a pattern, with X (M, K) and Y (N, K) row-major. The
    sizes M, N and K are run-time arguments.

    Attributes
    ----------
    atom : str
        Name of the MMA atom. Operand A of the MMA holds rows of Y, operand B rows of X.
    vector_length : int
        V, rows of a vector of the pattern.
    x, y : ElementType
        Element types of X and Y.
    out : str
        Dtype of the output.
    stride : int
        SR-BCRS stride of the output, in vectors.
    """

    atom: str
    vector_length: int
    x: ElementType
    y: ElementType
    out: str
    stride: int = 32

    @property
    def digits(self) -> tuple[int, int]:
        """Digit planes of X and of Y."""
        return num_digits(self.x), num_digits(self.y)

    @property
    def shifted(self) -> bool:
        """Whether accumulators hold 16 or 256 times the product: signed nibbles become the high halves of bytes."""
        signed4 = (self.x.bits == 4 and self.x.signed) or (self.y.bits == 4 and self.y.signed)
        return signed4 and self.entry.mma_bits == 8 and not self.entry.floating

    @property
    def operand_types(self) -> tuple[ElementType, ElementType]:
        return self.x, self.y

    def _tags(self) -> list[str]:
        return [f"k{self.stride}"]

    def _constants(self) -> dict[str, object]:
        return {
            "kVector": self.vector_length,
            "kBitsX": self.x.bits,
            "kBitsY": self.y.bits,
            "kSignedX": self.x.signed,
            "kSignedY": self.y.signed,
            "kFloat": self.entry.floating,
            "kStride": self.stride,
            "kLongTotal": self.out != "int32" and self.digits != (1, 1),
        }

    def index_key(self) -> tuple[object, ...]:
        """Return the fields that :meth:`index` depends on: configs with equal keys share it."""
        raise NotImplementedError

    def index(self, row_offsets: Tensor, columns: Tensor, row_start: Tensor, n: int) -> Tensor:
        """Return the index that the kernel reads besides the columns of a pattern.

        Parameters
        ----------
        row_offsets : Tensor, shape (R + 1,)
            int64 offsets of the vector rows.
        columns : Tensor, shape (vectors,)
            int32 columns of the vectors, increasing in each vector row.
        row_start : Tensor, shape (R,)
            int64 slot of the first vector of each vector row in the output.
        n : int
            Columns of the pattern.
        """
        raise NotImplementedError

    def launch(
        self,
        kernel: Kernel,
        pattern: Sequence[Tensor],
        x: DenseArg,
        y: DenseArg,
        out: OutputArg,
        row_scale: ScaleArg,
        col_scale: ScaleArg,
        pdl: bool = False,
    ) -> None:
        """Launch `kernel` on the current stream of torch.

        Parameters
        ----------
        kernel : Kernel
            Compiled kernel of this config.
        pattern : sequence of Tensor
            The result of :meth:`index`, and the columns of the output slots, -1 in the padding.
        x, y : DenseArg
            Dense operands, row-major along K.
        out : OutputArg
            Output and sizes.
        row_scale, col_scale : ScaleArg
            Scales of the rows of X and of Y.
        pdl : bool, default False
            Start while the previous kernel on the stream ends.
        """
        raise NotImplementedError

    @property
    def kernel_header(self) -> str:
        return "sddmm/panel.cuh" if self.STEM == "sddmm_panel" else "sddmm/gather.cuh"

    def _types(self) -> dict[str, str]:
        return {
            "FormatX": atoms.format_type(self.x),
            "FormatY": atoms.format_type(self.y),
            "OperandX": atoms.operand_type(atoms.operand_of(self.entry, self.x)),
            "OperandY": atoms.operand_type(atoms.operand_of(self.entry, self.y)),
            "Out": OUT_TYPES[self.out],
        }
