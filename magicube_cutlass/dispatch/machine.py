"""The GPU as kernel selection reads it, with measured cost models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from cute_kernels.machine import GatherModel, Machine, PanelModel, ResidentModel
from magicube_cutlass.dispatch import measured

_ROOM = "models"
_MODELS = ("panel", "gather", "resident")


def _numbers(model: PanelModel | GatherModel | ResidentModel) -> list[float]:
    return [each for value in asdict(model).values() for each in
            ([number for _, number in value] if isinstance(value, tuple) else [value])]  # fmt: skip


def _with_numbers(model: Any, numbers: Sequence[float]) -> Any:
    """The model with other constants, in the order of :func:`_numbers`."""
    rest = iter(numbers)
    found: dict[str, Any] = {}
    for name, value in asdict(model).items():
        found[name] = tuple((key, next(rest)) for key, _ in value) if isinstance(value, tuple) else next(rest)
    return replace(model, **found)


def save_models(device: str, machine: Machine) -> None:
    """Store the cost models of a GPU, by the name of the device."""
    measured.save(_ROOM, device, {name: _numbers(getattr(machine, name)) for name in _MODELS})


def load_models(device: str, machine: Machine) -> Machine:
    """Return the machine with the stored cost models of this GPU; unchanged if there are none."""
    found = measured.load(_ROOM, device)
    models: dict[str, Any] = {}
    for name in _MODELS:
        model = getattr(machine, name)
        numbers = found.get(name) if isinstance(found, dict) else None
        if not isinstance(numbers, list) or len(numbers) != len(_numbers(model)):
            return machine
        if not all(isinstance(each, float) and 0 < each < 1e9 for each in numbers):
            return machine
        models[name] = _with_numbers(model, numbers)
    return replace(machine, **models)


def forget_models(device: str) -> bool:
    """Remove the stored models of this GPU; return whether there were any."""
    path = measured.path_of(_ROOM, device)
    there = path.is_file()
    path.unlink(missing_ok=True)
    return there


@lru_cache
def get_machine(device: int) -> Machine:
    """Return the GPU of this index, with what ``magicube tune`` measured."""
    import torch

    from cute_kernels.jit.device import current_arch

    with torch.cuda.device(device):
        plain = Machine(current_arch(), torch.cuda.get_device_properties(device).multi_processor_count)
    return load_models(torch.cuda.get_device_name(device), plain)
