"""The record of a report: which backend and kernel a call uses, with the prose as its ``str``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Explanation"]


@dataclass(frozen=True)
class Explanation:
    """How a call runs; ``str`` is the prose, and ``"word" in explanation`` looks into it.

    Attributes
    ----------
    operator : str
        ``"spmm"``, ``"sddmm"``, ``"sparse_attention"`` or ``"matmul"``.
    backend : str
        ``"engine"`` (the CPU engine), ``"torch"`` or ``"cuda"``.
    kernel : str
        Instruction set of the engine, function of torch (``"reference"``: its int64 product), or name of the kernel
        config.
    text : str
        The prose.
    facts : mapping of str to object
        Numbers and names behind the prose: sizes, digits, bytes, predicted times.

    Examples
    --------
    >>> found = Explanation("spmm", "engine", "avx2", "CPU engine, avx2 path", {"threads": 1})
    >>> str(found), "avx2" in found, found.as_dict()["threads"]
    ('CPU engine, avx2 path', True, 1)
    """

    operator: str
    backend: str
    kernel: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def __contains__(self, text: str) -> bool:
        return text in self.text

    def as_dict(self) -> dict[str, Any]:
        """Return operator, backend, kernel and facts, without the prose."""
        return {"operator": self.operator, "backend": self.backend, "kernel": self.kernel, **self.facts}
