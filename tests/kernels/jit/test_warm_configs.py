"""What ``magicube warmup`` compiles."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
from functools import cache

import pytest

import cute_kernels
import magicube_cutlass as mc
from cute_kernels import catalog
from cute_kernels.dtypes import Integer
from cute_kernels.jit import Unit
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.spmm.heuristics import choose_spmm
from magicube_cutlass.dispatch.plan import size_bucket


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
    assert {"cute_kernels.convert.digits", "cute_kernels.estimate.look"} <= set(modules)
    missing = {name for name, configs in modules.items() if not warmed.issuperset(configs)}
    assert not missing


@cache
def warmed_units(every: bool, arch: str) -> frozenset[Unit]:
    """The units of ``warm_configs``, which take seconds."""
    return frozenset(config.translation_unit(arch) for config in catalog.warm_configs(every, arch))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_names_of_warmed_configs_are_unique(arch: str) -> None:
    units = warmed_units(True, arch)  # sizes need not be compiled in
    assert len({unit.title for unit in units}) == len(units) > 100


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_most_products_with_8_bit_weights_are_warmed(arch: str) -> None:
    warmed = warmed_units(False, arch)
    draw = random.Random(0)
    machine, found = Machine(arch, catalog.NUM_SMS[arch]), []
    for out in ("float32", "float16", "int32"):
        kind = ProblemTypes(8, Integer(8, True), Integer(8, True), out)
        for _ in range(200):
            rows, inner = round(2 ** draw.uniform(4, 10)), 64 * draw.randint(4, 64)
            lengths = [round(draw.uniform(0.03, 0.3) * inner)] * rows
            columns = size_bucket(round(2 ** draw.uniform(0, 12)))
            found.append(choose_spmm(kind, machine, Problem(rows, inner, sum(lengths), 10 + lengths[0], columns)))
    units = [each.translation_unit(arch) for each in found]
    share = sum(each in warmed for each in units) / len(units)
    assert share > 0.85, {each.title for each in units if each not in warmed}


def test_the_product_of_the_readme_is_warmed() -> None:
    names = {unit.title for unit in warmed_units(False, "sm_90a")}
    weight = mc.random_pattern(256, 512, 0.9, 8)
    lengths = weight.row_lengths
    sizes = Problem(weight.vector_rows, 512, weight.vectors, int(lengths.max()), size_bucket(128))
    kind = ProblemTypes(8, Integer(8, True), Integer(8, True), "float32")
    assert choose_spmm(kind, Machine("sm_90a", 132), sizes).name in names
