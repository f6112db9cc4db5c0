"""Module paths of the last release resolve, warn, and replace no function; pickles of it load."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from typing import Any

import pytest
import torch

import cute_kernels
import magicube_cutlass as mc
import residual
from cute_kernels._moved import _MovedModule

OLD = sorted(name for name, module in sys.modules.items() if isinstance(module, _MovedModule))


@pytest.mark.parametrize("name", OLD)
def test_every_home_can_be_imported(name: str) -> None:
    for home in sys.modules[name].__dict__["_homes"]:
        assert importlib.import_module(home).__name__ == home


def test_an_old_path_resolves_with_a_warning_that_names_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"magicube_cutlass\.srbcrs moved to magicube_cutlass\.formats\.srbcrs"):
        from magicube_cutlass.srbcrs import SRBCRS  # type: ignore[import-not-found]
    assert SRBCRS is mc.SRBCRS
    with pytest.warns(DeprecationWarning), pytest.raises(AttributeError, match="has no 'absent'"):
        assert sys.modules["cute_kernels.numbers"].Integer
        sys.modules["cute_kernels.numbers"].absent  # noqa: B018


def test_functions_of_the_packages_are_not_replaced() -> None:
    assert callable(mc.quantize) and callable(residual.decompose) and callable(residual.qr) and callable(residual.solve)
    assert len(OLD) > 20 and cute_kernels.__name__ in OLD[0]


def _old_state(matrix: mc.SRBCRS) -> dict[str, Any]:
    """The state of a matrix with the field names of the last release."""
    state = {**matrix.__dict__, "_cache": {}, "_execution": {}, "_used_once": matrix.single_use, "_edition": "1"}
    return {name: value for name, value in state.items() if name not in ("_single_use", "_version_id")}


def test_old_names_of_attributes_warn_and_work() -> None:
    matrix = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    with pytest.warns(DeprecationWarning, match="number is deprecated; use element_type"):
        assert matrix.number == matrix.element_type
    with pytest.warns(DeprecationWarning, match="used_once is deprecated; use single_use"):
        matrix.used_once = True
    assert matrix.single_use
    with pytest.warns(DeprecationWarning, match="number is deprecated; use element_type"):
        assert mc.quantize(torch.ones(4, 4), bits=8).number.bits == 8


def test_a_pickle_of_the_last_release_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    scaled = mc.quantize(torch.ones(4, 4), bits=8)
    with monkeypatch.context() as patch:  # classes as they were named then
        patch.setattr(mc.SRBCRS, "__module__", "magicube_cutlass.srbcrs")
        patch.setattr(mc.QuantTensor, "__module__", "magicube_cutlass.quantize")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            patch.setattr(mc.SRBCRS, "__getstate__", _old_state)
            old = pickle.dumps((matrix, scaled))
    assert b"magicube_cutlass.srbcrs" in old and b"magicube_cutlass.quantize" in old
    with pytest.warns(DeprecationWarning):
        found, ints = pickle.loads(old)
    assert not found.single_use and found._version_id
    assert torch.equal(found.to_dense(), matrix.to_dense()) and torch.equal(ints.data, scaled.data)
