"""Base of the configs of the sparse products: names, and configs from names."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, ClassVar, Self

from cute_kernels import atoms
from cute_kernels.atoms import Atom
from cute_kernels.dtypes import ElementType, element_type
from cute_kernels.jit.codegen import KernelConfig


class SparseConfig(KernelConfig):
    """Config of an SpMM or SDDMM kernel, whose name gives it back: compiled and exported graphs store names.

    A subclass is a frozen dataclass that begins with the MMA atom, the vector length, two element types and the output
    dtype.
    """

    STEM: ClassVar[str]
    SIZES: ClassVar[str]  # regular expression of the part of a name that holds sizes; its groups are fields
    FLAGS: ClassVar[dict[str, tuple[str, bool]]] = {}  # part of a name -> field and value

    atom: str
    vector_length: int
    out: str

    @cached_property
    def entry(self) -> Atom:
        """MMA atom."""
        return atoms.atom(self.atom)

    @property
    def kernel_entry(self) -> str:
        return self.STEM

    def _preamble(self) -> str:
        return atoms.declaration(self.entry)

    @property
    def operand_types(self) -> tuple[ElementType, ElementType]:
        """Element types of both operands."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        pair = "x".join(each.name for each in self.operand_types)
        return "-".join([self.STEM, self.atom, f"v{self.vector_length}", pair, self.out, *self._tags()])

    def _tags(self) -> list[str]:
        raise NotImplementedError

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return the config of this name.

        Raises
        ------
        ValueError
            If no config of this kernel has it.

        Examples
        --------
        >>> from cute_kernels.spmm.gather import GatherConfig
        >>> GatherConfig.from_name("spmm_gather-s8_m16n8k32-v8-s8xu4-float16-b64s4w4r2-wide").split_k_warps
        2
        """
        _, *operands, tags = [*name.split("-", 5), ""][:6]
        sizes = [part for part in tags.split("-") if part not in cls.FLAGS]
        found = re.fullmatch(cls.SIZES, sizes[0]) if len(sizes) == 1 else None
        if found and len(operands) == 4 and re.fullmatch(r"v\d+", operands[1]):
            fields: dict[str, Any] = dict(cls.FLAGS[part] for part in tags.split("-") if part in cls.FLAGS)
            fields |= {field: cls._size(field, text) for field, text in found.groupdict().items() if text is not None}
            types = [element_type(each) for each in operands[2].split("x")]
            if len(types) == 2:
                arguments: tuple[Any, ...] = (operands[0], int(operands[1][1:]), *types, operands[3])
                config = cls(*arguments, **fields)
                if config.name == name:
                    return config
        raise ValueError(f"kernel must be the name of a config of {cls.STEM}, got {name!r}")

    @classmethod
    def _size(cls, field: str, text: str) -> int:
        """The value of a field, of what a name says of it."""
        return int(text)
