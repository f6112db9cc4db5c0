"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], description: str, progress: bool) -> Iterable[T]:
    """The items, with a bar if `progress`."""
    if not progress:
        return items
    from rich.console import Console
    from rich.progress import track as shown

    return shown(items, description, console=Console(stderr=True), transient=True)
