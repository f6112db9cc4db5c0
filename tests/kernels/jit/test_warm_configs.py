"""What ``magicube warmup`` compiles."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import cute_kernels
from cute_kernels import catalog


def configs_by_module() -> dict[str, list[object]]:
    """The configs of each module that names its own."""
    found: dict[str, list[object]] = {}
    for module in pkgutil.walk_packages(cute_kernels.__path__, "cute_kernels."):
        if module.name.endswith("._engine") or module.name == catalog.__name__:
            continue
        make = getattr(importlib.import_module(module.name), "default_configs", None)
        if inspect.isfunction(make) and make.__module__ == module.name:
            arguments = {"arch": "sm_90a"} if "arch" in inspect.signature(make).parameters else {}
            found[module.name] = list(make(**arguments))
    return found


def test_the_configs_of_every_module_are_warmed() -> None:
    warmed = set(catalog.warm_configs(False, "sm_90a"))
    modules = configs_by_module()
    assert {"cute_kernels.convert.digits", "cute_kernels.estimate.remainder_probes"} <= set(modules)
    missing = {name for name, configs in modules.items() if not warmed.issuperset(configs)}
    assert not missing


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_names_of_warmed_configs_are_unique(arch: str) -> None:
    configs = set(catalog.warm_configs(True, arch))
    assert len({config.translation_unit(arch).title for config in configs}) == len(configs)
