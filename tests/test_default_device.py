"""Results lie where the operands do, whatever ``torch.set_default_device`` names."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import magicube_cutlass as mc
import residual
from cute_kernels.gemm.api import gemm
from tests.house import modules

FACTORIES = {  # what torch puts on the default device unless told otherwise
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor",
    "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_every_factory_call_names_its_device() -> None:
    silent = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not silent, "\n".join(silent)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


A, B = drawn(64, 80), drawn(80, 48, seed=1)
Q, K, V = drawn(3, 2, 4, 96, 16, seed=2)
MASK = mc.masks.local(96, 24)
SPARSE = mc.SRBCRS.from_dense((drawn(64, 80, seed=3) > 0.5).to(torch.int8), vector_length=8)
LINEAR = nn.Linear(80, 64)


def converted(calibrated: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(80, 64, device="cpu"), nn.ReLU())
    model[0].load_state_dict(LINEAR.state_dict())
    batches = [A] if calibrated else None
    mc.convert(model, mc.nn.SparseQuantConfig(sparsity=0.5), calibrate=batches, progress=False)
    return model


def gradient() -> Tensor:
    model = converted()
    model(A).square().sum().backward()
    return model[0].weight.grad


CALLS: dict[str, Callable[[], Tensor]] = {
    "quantize": lambda: mc.quantize(A, 4, "row").ints(),
    "compress": lambda: mc.SRBCRS.from_dense(A.round().to(torch.int8), vector_length=4).to_dense(),
    "spmm": lambda: mc.spmm(SPARSE, mc.quantize(B, 8, "column")),
    "sddmm": lambda: mc.sddmm(mc.quantize(Q[0, 0], 8, "row"), mc.quantize(K[0, 0], 8, "row"), MASK).to_dense(),
    "gemm": lambda: gemm(A.round().to(torch.int8), B.round().to(torch.int8)),
    "attention": lambda: mc.sparse_attention(Q, K, V, MASK),
    "unfused": lambda: mc.sparse_attention(Q, K, V, [MASK] * 4, bias=drawn(96), backend="unfused"),
    "layer": lambda: converted()(A),
    "static": lambda: converted(calibrated=True)(A),
    "gradient": gradient,
    "dense": lambda: mc.nn.QuantLinear.from_linear(LINEAR)(A),
    "matmul": lambda: residual.matmul(A, B, tol=1e-5, seed=0),
    "direct": lambda: residual.matmul(A, B, mode="direct"),
    "three digits": lambda: residual.matmul(A, B, mode="three_digit"),
    "qr": lambda: residual.qr(drawn(64, 32))[0],
    "solve": lambda: residual.solve(drawn(32, 32), drawn(32, seed=4))[0],
    "linear": lambda: residual.ResidualLinear.from_linear(LINEAR, tol=1e-2)(A),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_do_not_depend_on_the_default_device(call: Callable[[], Tensor]) -> None:
    expected = call()
    with torch.device("meta"):  # a tensor made there by mistake has no memory
        found = call()
    assert torch.equal(found, expected)
