"""vLLM on a CPU: int8 linear layers by the engine. The entry point ``vllm.general_plugins`` calls :func:`register`."""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Put the kernel of :mod:`magicube_cutlass.hooks.vllm_kernel` behind vLLM's int8 kernels of a CPU, or before them.

    vLLM takes the first that fits. With ``MAGICUBE_VLLM=1`` that is this one for W8A8 checkpoints with symmetric
    activations, dynamic or static, such as those of
    :func:`magicube_cutlass.hooks.compressed_tensors.save_compressed`; it was not timed against vLLM's. Another call, or
    another platform, changes nothing.

    Examples
    --------
    >>> register()  # doctest: +SKIP
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    from magicube_cutlass.hooks.vllm_kernel import MagicubeInt8Kernel

    known = linear._POSSIBLE_INT8_KERNELS
    if MagicubeInt8Kernel not in known.get(PlatformEnum.CPU, []):
        linear.register_linear_kernel(MagicubeInt8Kernel, PlatformEnum.CPU, "int8")
        if os.environ.get("MAGICUBE_VLLM") == "1":
            known[PlatformEnum.CPU].insert(0, known[PlatformEnum.CPU].pop())
