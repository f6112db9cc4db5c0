"""Module paths of the last release: they resolve to the modules' new homes, with a ``DeprecationWarning``.

A pickle names the module of a class, so that pickles of the last release load through these as well.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class _MovedModule(ModuleType):
    """Stands for the module that was at ``__name__``; attributes come from its new homes."""

    def __init__(self, name: str, homes: tuple[str, ...]) -> None:
        super().__init__(name)
        self.__dict__["_homes"] = homes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by tools that look at all of them
            raise AttributeError(name)
        for home in self._homes:
            found = getattr(import_module(home), name, None)
            if found is not None:
                text = f"{self.__name__} moved to {home}; the old path works for one minor release"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return found
        raise AttributeError(f"module {self.__name__!r} moved to {', '.join(self._homes)}, which has no {name!r}")


def register_moved(package: str, homes: Mapping[str, tuple[str, ...]]) -> None:
    """Let old module names of `package` resolve to their `homes`, names of modules that have the attributes.

    The package's own attributes stay: a function of an old module's name is not replaced.
    """
    for old, new in homes.items():
        name = f"{package}.{old}"
        sys.modules.setdefault(name, _MovedModule(name, new))
