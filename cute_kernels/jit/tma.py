"""Tensor maps for TMA."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from cute_kernels.jit.kernel import TENSOR_MAP_BYTES, _check, _driver


@lru_cache(maxsize=256)
def tensor_map(
    pointer: int,
    element_bytes: int,
    shape: tuple[int, ...],
    pitch_bytes: int | tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    unpack: int = 0,
) -> bytes:
    """Encode a tensor map: the 128 bytes of a ``const __grid_constant__ cute::TmaDescriptor``.

    TMA fills with zeros what a box has outside of the matrix.

    Parameters
    ----------
    pointer : int
        Address of the matrix, a multiple of 16 (32 if `unpack`).
    element_bytes : int
        Bytes per unsigned element: 1, 2, 4 or 8.
    shape : tuple of int
        Elements of the matrix, (inner, outer); up to five sizes of a tensor.
    pitch_bytes : int or tuple of int
        Bytes from one row to the next, a multiple of 16 (32 if `unpack`); of a tensor for each size but the inner one.
    box : tuple of int
        Elements of a box, (inner, outer) or as many as `shape`, each at most 256.
    swizzle : int, default 0
        Bytes of the shared-memory swizzle: 0, 32, 64 or 128; not below the box's inner bytes.
    unpack : int, default 0
        4 or 6 on sm_100a and sm_103a: bits of a packed element. TMA spreads 16 elements over 16 bytes.

    Returns
    -------
    bytes

    Raises
    ------
    ValueError
        If `element_bytes`, `swizzle` or `unpack` is not one of these.
    DeviceError
        If the driver refuses the map.

    References
    ----------
    CUDA driver API, ``cuTensorMapEncodeTiled``.

    Examples
    --------
    >>> len(tensor_map(x.data_ptr(), 1, (4096, 512), 4096, (128, 64), swizzle=128))  # doctest: +SKIP
    128
    """
    if element_bytes not in (1, 2, 4, 8):
        raise ValueError(f"element_bytes must be one of (1, 2, 4, 8), got {element_bytes!r}")
    if swizzle not in (0, 32, 64, 128):
        raise ValueError(f"swizzle must be one of (0, 32, 64, 128), got {swizzle!r}")
    if unpack not in (0, 4, 6) or (unpack and element_bytes != 1):
        raise ValueError(f"unpack must be one of (0, 4, 6), not 0 for 1 byte only, got {unpack!r} for {element_bytes}")
    driver = _driver()
    element = f"16U{unpack}_ALIGN16B" if unpack else f"UINT{8 * element_bytes}"
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}")
    pattern = f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B" if swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE"
    result = driver.cuTensorMapEncodeTiled(
        kind,
        len(shape),
        pointer,
        [driver.cuuint64_t(size) for size in shape],
        [driver.cuuint64_t(size) for size in (pitch_bytes if isinstance(pitch_bytes, tuple) else (pitch_bytes,))],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, pattern),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    asked = f"shape {shape} of {element}, pitch {pitch_bytes}, box {box}, swizzle {swizzle}"
    return ctypes.string_at(int(_check(f"tensor map with {asked} at {pointer:#x}", result).getPtr()), TENSOR_MAP_BYTES)
