"""Registration of torch operators: one implementation, one fake that names only what it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def register_op(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any] | None,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Define a torch operator for CPU and CUDA tensors and return it.

    ``torch.library.custom_op`` is not used: it imports the compiler stack at its first call, about 1 s.

    Parameters
    ----------
    name : str
        Namespace and name, such as ``"magicube::spmm"``.
    implementation : callable
        Function with annotated parameters, from which the schema is inferred. It looks at its tensors' device itself.
    fake : callable or None
        Returns empty outputs. It gets those arguments of the operator that its parameters name. None: no output.
    mutates : tuple of str
        Parameters that are written in place.

    Returns
    -------
    torch._ops.OpOverloadPacket
        ``torch.ops.<namespace>.<name>``.
    """
    torch.library.define(name, torch.library.infer_schema(implementation, mutates_args=mutates))
    torch.library.impl(name, ("cpu", "cuda"))(implementation)
    if fake is not None:
        signature, wanted = inspect.signature(implementation), tuple(inspect.signature(fake).parameters)

        def run_fake(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments
            return fake(**{name: given[name] for name in wanted})

        torch.library.register_fake(name)(run_fake)
    namespace, _, leaf = name.partition("::")
    return getattr(getattr(torch.ops, namespace), leaf)
