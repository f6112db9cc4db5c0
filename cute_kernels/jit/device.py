"""The GPU of a call."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.jit.compiler import check_arch

_HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of `x` is torch's current one; free if it is already."""
    return on_device(x.device.index)


def on_device(device: int | None) -> AbstractContextManager[object]:
    """Return a context in which `device` is torch's current one; free if it is already."""
    # torch.cuda.current_device() asks the same behind three calls
    return _HERE if torch._C._cuda_getDevice() == device else torch.cuda.device(device)


@lru_cache
def num_sms(device: int) -> int:
    """Return the number of SMs of `device`."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Compute capability -> arch.  A cubin runs on chips of its major version from its minor one on, except the "a" ones.
CAPABILITIES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}


class DeviceError(RuntimeError):
    """There is no usable GPU, or the driver refused a call.

    Examples
    --------
    >>> current_arch()  # doctest: +SKIP
    Traceback (most recent call last):
    DeviceError: kernels need a CUDA device, and torch has none: Torch not compiled with CUDA enabled
    """


def _device() -> int:
    """Torch's current device; raises :class:`DeviceError` if there is none."""
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        # Asked of torch and not of cuda.core, whose objects deadlock once they have missed the driver.
        raise DeviceError(f"kernels need a CUDA device, and torch has none: {error}") from None


def current_arch() -> str:
    """Return the arch to compile for: ``MAGICUBE_ARCH``, else that of torch's current device.

    Returns
    -------
    str
        One of :data:`~cute_kernels.jit.compiler.ARCHES`.

    Raises
    ------
    ValueError
        If ``MAGICUBE_ARCH`` is unknown.
    DeviceError
        If the device has no arch here.

    Examples
    --------
    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, MAGICUBE_ARCH="sm_90a"):
    ...     current_arch()
    'sm_90a'
    """
    if arch := os.environ.get("MAGICUBE_ARCH"):
        check_arch(arch)
        return arch
    capability = torch.cuda.get_device_capability(_device())
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        raise DeviceError(
            f"compute capability must be one of {known}, got {capability[0]}.{capability[1]}; "
            "MAGICUBE_ARCH=compute_80 runs the kernels of 8.0 on newer devices"
        )
    return CAPABILITIES[capability]
