"""The GPU that a call runs on."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.jit.compiler import check_arch

_HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """The device of ``x`` as torch's current one; nothing to do, as nearly always, when it is."""
    # torch.cuda.current_device() asks the same behind three calls
    return _HERE if torch._C._cuda_getDevice() == x.device.index else torch.cuda.device(x.device)


@lru_cache
def num_sms(device: int) -> int:
    """Of this device."""
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
    """No usable GPU, or the driver refused a call: which call, for which kernel, and the driver's own error name."""


def _device() -> int:
    """Torch's current device; raises :class:`DeviceError` where there is none."""
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        # Asked of torch and not of cuda.core, whose objects deadlock once they have missed the driver.
        raise DeviceError(f"kernels need a CUDA device, and torch has none: {error}") from None


def current_arch() -> str:
    """The arch to compile for: ``MAGICUBE_ARCH``, else that of torch's current device.

    Raises ``ValueError`` for an unknown ``MAGICUBE_ARCH`` and :class:`DeviceError` for a device without an arch.
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
