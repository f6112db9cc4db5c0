"""SpMM and SDDMM of integers and floats, and matrices made on the GPU, for :mod:`launch_cases`."""

# ruff: noqa: B023 - a function of a loop's variables runs before the loop continues

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import dtypes as numbers
from magicube_cutlass import autograd, checks
from tests import helpers
from tests.kernels.launch_fakes import array
from tests.kernels.launch_recorder import Recorder

BITS = (4, 8, 12, 16)
SIGNS = tuple(product((True, False), repeat=2))
INTEGER_OUTS = (torch.int32, torch.int64)
FLOAT_OUTS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT_PAIRS = [pair for pair in product(numbers.FLOATS, numbers.FLOATS) if set(pair) != set(numbers.HALF_DTYPES)]
#         rows, inner, columns of B, batch, density
SHAPES = [(130, 200, 64, (), 0.3), (100, 96, 33, (2,), 0.2), (512, 520, 128, (), 0.4), (77, 130, 8, (), 0.3),
          (256, 300, 1, (), 0.2), (1024, 1024, 256, (), 0.3), (48, 640, 16, (3, 2), 0.3)]  # fmt: skip


_drawn: dict[
    tuple[tuple[int, ...], int], Tensor
] = {}  # what several GPUs' cases read; drawing takes longer than copying
_MOST_DRAWN = 1 << 22  # elements of one that is kept


def reals(*shape: int, seed: int = 0) -> Tensor:
    """float32 multiples of 1/8 in [-8, 8)."""
    found = _drawn.get((shape, seed))
    if found is None:
        found = torch.randint(-64, 64, shape, generator=torch.Generator().manual_seed(seed)).float() / 8
        if found.numel() <= _MOST_DRAWN and sum(each.numel() for each in _drawn.values()) < 1 << 26:
            _drawn[shape, seed] = found
    return found.clone()


def sparse(
    m: int, k: int, bits: int = 8, signed: bool = True, v: int = 8, density: float = 0.3, stride: int = 32,
    scale: str = "none",
) -> mc.SRBCRS:  # fmt: skip
    """Integers on a random pattern with vector rows of several lengths; ``scale``: none, one or rows."""
    pattern = mc.random_pattern(m, k, 1 - density, v)
    vectors = helpers.random_ints((pattern.vectors, v), bits, signed)
    scales = {"none": None, "one": torch.tensor(0.5), "rows": reals(m, 1).abs() + 1}
    return mc.SRBCRS.from_pattern(pattern, vectors, bits=bits, signed=signed, stride=stride, scale=scales[scale])


def dense(
    shape: tuple[int, ...], bits: int = 8, signed: bool = True, layout: str = "row", scale: str = "none"
) -> mc.QuantTensor:
    """``scale``: none, one, columns, or batch, of columns of each matrix."""
    ints = helpers.random_ints(shape, bits, signed)
    x = ints.mT.contiguous().mT if layout == "column" else ints
    columns = shape[-1]
    scales = {
        "none": None,
        "one": torch.tensor(0.25),
        "columns": reals(1, columns).abs() + 1,
        "batch": reals(*shape[:-2], 1, columns).abs() + 1,
    }
    return mc.QuantTensor.from_ints(x, bits=bits, signed=signed, scale=scales[scale])


def call_and_repeat(recorder: Recorder, key: str, a: mc.SRBCRS | mc.BCRS, b: Any, **options: Any) -> None:
    """A call, and a cached one with operands at other addresses."""
    named: dict[str, Any] = {"B": b if isinstance(b, Tensor) else b.data, "scale_a": a.scale}
    named["scale_b"] = None if isinstance(b, Tensor) else b.scale
    named |= {name: options[name] for name in ("bias", "out") if options.get(name) is not None}
    recorder.call(f"spmm {key}", lambda: mc.spmm(a, b, **options), **named)
    recorder.call(f"spmm {key}, again", lambda: mc.spmm(a, b, **options), **named)


def spmm_integers(recorder: Recorder) -> None:
    """Every pair of widths and signs; vector lengths, shapes, layouts, scales and outputs take turns."""
    for i, (left, right, (s, t)) in enumerate(product(BITS, BITS, SIGNS)):
        m, k, n, batch, density = SHAPES[i % 7]
        v, stride = checks.VECTOR_LENGTHS[(i + i // 6) % 6], checks.STRIDES[i % 3]
        layout, floating = ("row", "column")[i % 5 == 4], i % 3 != 0
        scales = ("none", "one", "rows")[i % 3], ("none", "one", "columns", "batch")[i % 4]
        out = FLOAT_OUTS[i // 3 % 3] if floating else torch.int64
        a = sparse(m, k, left, s, v, density, stride, scales[0] if floating else "none")
        b = dense((*batch, k, n), right, t, layout, scales[1] if floating else "none")
        bias = reals(m) if floating and i % 2 else None
        key = f"{'su'[not s]}{left} x {'su'[not t]}{right}, v{v}, {m}x{k}x{n}, batch {list(batch)}, {layout}"
        call_and_repeat(recorder, f"{key}, {scales[0]}, {scales[1]}, {out}", a, b, out_dtype=out, bias=bias)


def spmm_columns(recorder: Recorder) -> None:
    """Few columns and odd ones, outputs that are given, operands that are not aligned, and nothing at all."""
    for n in (1, 2, 7, 8, 16, 24, 32, 48, 64, 100, 511, 512):
        a = sparse(512, 768, density=0.4, scale="rows")
        out = torch.zeros(512, n, dtype=torch.float16)
        call_and_repeat(recorder, f"of {n} columns", a, dense((768, n), scale="columns"), out_dtype=torch.float16)
        call_and_repeat(recorder, f"of {n} columns to out", a, dense((768, n), scale="one"), out=out, bias=reals(512))
    for bits, layout, shift in product((4, 8, 16), ("row", "column"), (0, 8)):
        whole = dense((2 * 400 + 16, 64), bits, layout=layout)
        moved = whole.data.as_strided((400 if bits != 4 or layout == "row" else 200, whole.data.shape[1]),
                                      whole.data.stride(), shift // whole.data.element_size())  # fmt: skip
        b = replace(whole, data=moved, shape=torch.Size((400, 64)))
        call_and_repeat(recorder, f"B of {bits} bits, {layout}, from byte {shift}", sparse(200, 400), b)
    for m, k, n in ((0, 16, 16), (16, 0, 16), (16, 16, 0)):
        call_and_repeat(recorder, f"empty {m}x{k}x{n}", sparse(m, k), dense((k, n), scale="one"))
    once = sparse(1024, 1024)
    once.single_use = True
    call_and_repeat(recorder, "used once", once, dense((1024, 256)))
    call_and_repeat(recorder, "BCRS", sparse(200, 400).to_bcrs(), dense((400, 64)))
    call_and_repeat(
        recorder,
        "of one row of B for all",
        sparse(64, 96),
        replace(dense((96, 64)), data=dense((1, 64)).data.expand(96, 64)),
    )


def spmm_kernels(recorder: Recorder) -> None:
    """Given configs and instructions."""
    kinds = [(8, 8, "int32"), (16, 8, "float16"), (4, 4, "float16"), (16, 16, "int64")]
    for left, right, out in kinds:
        a, b = sparse(300, 1500, left, density=0.4), dense((1500, 200), right)
        numbers_of = a.element_type, b.element_type
        for config in _configs(out, *numbers_of):
            options = {"config": config, "out_dtype": getattr(torch, out)}
            call_and_repeat(recorder, f"with {config.name}", a, b, **options)
            many = dense((3, 1500, 72), right)
            call_and_repeat(recorder, f"with {config.name}, batch", a, many, **options)
    a, b = sparse(1200, 600), dense((600, 512))  # more row blocks and strips than SMs
    for config in _configs("int32", a.element_type, b.element_type):
        call_and_repeat(recorder, f"with {config.name}, large", a, b, config=config)
    for atom, bits in (("s8_m16n8k32", 8), ("s8_m16n8k16", 8), ("int4_as_int8_m16n8k32", 4), ("s8_m16n8k32", 4)):
        call_and_repeat(
            recorder, f"with {atom}, {bits} bits", sparse(200, 400, bits), dense((400, 64), bits), atom=atom
        )


def _configs(out: str, left: Any, right: Any) -> list[Any]:
    from cute_kernels.spmm import gather as spmm_gather
    from cute_kernels.spmm import panel as spmm_panel
    from cute_kernels.spmm import resident as spmm_resident

    name = "int4_as_int8_m16n8k32" if (left.bits, right.bits) == (4, 4) else "s8_m16n8k32"
    operands = (name, 8, left, right, out)
    gather, panel = spmm_gather.GatherConfig(*operands), spmm_panel.PanelConfig(*operands)
    small = replace(panel, tile=256, warps=3, tile_n_bytes=64)
    resident = spmm_resident.ResidentConfig(*operands, tile=1504, block_rows=5, stages=2)
    return [
        gather,
        replace(gather, split_k_warps=4),
        replace(gather, tile_n_bytes=128, stages=3),
        replace(gather, a_just_written=True),
        small,
        replace(small, rows_per_warp=2, cluster=2),
        replace(small, rows_per_warp=3, a_stages=4, ordered=False),
        replace(small, tile_n_bytes=16, tile=512, a_stages=3),
        replace(small, swizzle=False, tile_window=4, stages=5),
        resident,
        replace(resident, tile_n_bytes=32, cluster=2, tile=752, warps=4),
    ]


def spmm_floats(recorder: Recorder) -> None:
    """Every pair of formats."""
    for i, (left, right) in enumerate(FLOAT_PAIRS):
        m, k, n, batch, density = SHAPES[i % 7]
        v = checks.VECTOR_LENGTHS[(i + i // 6) % 6]
        x = reals(m, k) * mc.random_pattern(m, k, 1 - density, v).to_dense()
        a = mc.SRBCRS.from_dense(
            x, vector_length=v, dtype=left, scale="tensor" if left in numbers.HALF_DTYPES else ("tensor", "row")[i % 2]
        )
        y = reals(*batch, k, n, seed=1)
        y = y.mT.contiguous().mT if i % 4 == 3 else y
        half = right in numbers.HALF_DTYPES
        b = (
            y.to(numbers.FLOAT_DTYPES[right])
            if half
            else mc.quantize(y, dtype=right, scale=("tensor", "column")[i // 2 % 2])
        )
        bias, out = (reals(m) if i % 2 else None), FLOAT_OUTS[i % 3]
        call_and_repeat(
            recorder, f"{left} x {right}, v{v}, {m}x{k}x{n}, batch {list(batch)}", a, b, out_dtype=out, bias=bias
        )


def spmm_dense(recorder: Recorder) -> None:
    """The dense product in place of the sparse one."""
    for left, right, batch, scale in ((8, 8, (), "none"), (4, 8, (), "columns"), (8, 4, (2,), "batch")):
        a = sparse(256, 512, left, density=0.9, scale="rows" if scale != "none" else "none")
        b = dense((*batch, 512, 512), right, scale=scale)
        call_and_repeat(recorder, f"{left} x {right} allowing dense, batch {list(batch)}", a, b, allow_dense=True)


def sddmm(recorder: Recorder) -> None:
    """Every pair of widths; signs, shapes, layouts, scales and outputs take turns; small and large patterns."""
    shapes = [(96, 130, 64, (), 0.2), (1024, 1024, 128, (), 0.3), (77, 90, 40, (2,), 0.3), (512, 2048, 64, (), 0.4),
              (1024, 700, 256, (), 0.3), (130, 1024, 500, (), 0.2)]  # fmt: skip
    for i, ((left, right), large) in enumerate(product(product(BITS, BITS), (0, 1))):
        m, n, k, batch, density = shapes[(i // 2 * 2 + large) % 6]
        v, stride, (s, t) = (8, 16, 4, 8, 2, 32, 1)[i % 7], checks.STRIDES[i % 3], SIGNS[i % 4]
        floating, turned = i % 3 != 0, i % 5 == 1
        out = FLOAT_OUTS[i % 3] if floating else INTEGER_OUTS[left * right < 128 or (left, right) == (8, 8)]
        if not floating:
            out = torch.int64
        x = dense((*batch, m, k), left, s, ("row", "column")[i % 7 == 6])
        y = dense((*batch, k, n) if turned else (*batch, n, k), right, t, ("row", "column")[i % 4 == 3])
        if floating:
            rows = reals(m, 1).abs() + 1 if i % 2 else torch.tensor(0.5)
            others = reals(*((1, n) if turned else (n, 1))).abs() + 1 if i % 3 == 1 else torch.tensor(2.0)
            x, y = (
                replace(x, scale=rows, axis=1 if i % 2 else None),
                replace(y, scale=others, axis=None if i % 3 != 1 else 0 if turned else 1),
            )
        mask = sparse(m, n, v=v, density=density, stride=stride)
        key = f"sddmm {'su'[not s]}{left} x {'su'[not t]}{right}, v{v}, {m}x{n}x{k}, batch {list(batch)}, {out}"
        _sample(recorder, f"{key}{', turned' if turned else ''}", x, y, mask, out_dtype=out, transposed_y=turned)


def sddmm_floats(recorder: Recorder) -> None:
    """Every pair of formats."""
    shapes = [(96, 130, 64, (), 0.2), (1024, 1024, 128, (), 0.3), (77, 90, 40, (2,), 0.3)]
    for i, (left, right) in enumerate(FLOAT_PAIRS):
        m, n, k, batch, density = shapes[i % 3]
        x, y = (
            z.to(numbers.FLOAT_DTYPES[name])
            if name in numbers.HALF_DTYPES
            else mc.quantize(z, dtype=name, scale=("tensor", "row")[i % 2])
            for z, name in ((reals(*batch, m, k), left), (reals(*batch, n, k), right))
        )
        mask = sparse(m, n, v=checks.VECTOR_LENGTHS[i % 6], density=density, stride=checks.STRIDES[i % 3])
        _sample(recorder, f"sddmm {left} x {right}, {m}x{n}x{k}", x, y, mask, out_dtype=FLOAT_OUTS[i % 3])


def _sample(recorder: Recorder, key: str, x: Any, y: Any, mask: mc.SRBCRS, **options: Any) -> None:
    named: dict[str, Any] = {}
    for name, each in (("X", x), ("Y", y)):
        named[name] = each if isinstance(each, Tensor) else each.data
        if not isinstance(each, Tensor):
            named[f"scale_{name.lower()}"] = each.scale
    recorder.call(key, lambda: mc.sddmm(x, y, mask, **options).values, **named)
    recorder.call(f"{key}, again", lambda: mc.sddmm(x, y, mask, **options).values, **named)


def made(recorder: Recorder) -> None:
    """Dense matrices that become sparse ones on the GPU, whose size the second kernel writes."""

    def tell(arguments: list[Any]) -> None:
        array(arguments[5], np.int64, 1)[0] = 640

    total = {"compress-layout_rows": tell}
    matrices = {
        "int8": reals(130, 200).to(torch.int8),
        "int32": reals(130, 3000).to(torch.int32),
        "float32": reals(130, 200),
    }
    matrices |= {
        "float16": reals(77, 96).half(),
        "bfloat16": reals(77, 96).bfloat16(),
        "float64": reals(40, 64).double(),
    }
    matrices |= {"int16, column by column": reals(64, 96).to(torch.int16).mT.contiguous().mT, "wide": reals(64, 4096)}
    for (name, x), bits in product(matrices.items(), (4, 8, 16)):
        v, signed = {4: 8, 8: 2, 16: 32}[bits], bits != 16 or x.is_floating_point()
        options: dict[str, Any] = {
            "vector_length": v,
            "bits": bits,
            "signed": signed,
            "stride": {4: 32, 8: 16, 16: 64}[bits],
        }
        if x.is_floating_point():
            options["axis"] = 1 if bits == 8 else None
        recorder.call(f"from_dense {name}, {bits} bits", lambda: mc.SRBCRS.from_dense(x, **options), answers=total, X=x)
        mask = (reals(*x.shape, seed=1) > 4).repeat_interleave(1, 0)
        recorder.call(f"from_mask {name}, {bits} bits", lambda: mc.SRBCRS.from_mask(x, mask, **options),
                      answers=total, X=x, mask=mask)  # fmt: skip
    clipped = reals(64, 96)
    for clip in ("mse", 99.0):
        recorder.call(f"from_dense clipped by {clip}", lambda: mc.SRBCRS.from_dense(clipped, clip=clip), answers=total)


def gradients(recorder: Recorder) -> None:
    """The differentiable products, there and back, and a layer."""
    for v, bits in ((8, 8), (4, 4), (2, 16)):
        pattern = mc.random_pattern(96, 128, 0.7, v)
        values = reals(pattern.vectors, v).requires_grad_()
        x = reals(128, 40).requires_grad_()

        def product_of_values() -> Any:
            matrix = autograd.compress(values, pattern)
            return torch.autograd.grad(autograd.spmm(matrix, x, values=values).sum(), (x, values))

        recorder.call(f"gradients of spmm, v{v}, {bits} bits", product_of_values, x=x, values=values)
    layer = mc.nn.SparseQuantLinear.from_linear(_linear(128, 96), mask=mc.random_pattern(96, 128, 0.7, 8))
    tokens = reals(3, 20, 128).requires_grad_()
    recorder.call("a layer", lambda: torch.autograd.grad(layer(tokens).sum(), tokens), x=tokens)
    recorder.call("a layer, again", lambda: layer.eval()(tokens.detach()), x=tokens)
    recorder.call("a frozen layer", lambda: layer.freeze()(tokens.detach()), x=tokens)
    still, out = tokens.detach(), list[Tensor]()  # results that live give the next one another address
    for call in range(3):
        recorder.call(f"a frozen layer, warm, call {call}", lambda: out.append(layer(still)), x=still)
    many = reals(100, 128)
    for call in range(3):
        recorder.call(f"a frozen layer of 100 tokens, call {call}", lambda: out.append(layer(many)), x=many)


def _linear(inner: int, outer: int) -> torch.nn.Linear:
    linear = torch.nn.Linear(inner, outer)
    with torch.no_grad():
        linear.weight.copy_(reals(outer, inner))
        assert linear.bias is not None
        linear.bias.copy_(reals(outer))
    return linear


def record(recorder: Recorder) -> None:
    """All of them."""
    for family in (
        spmm_integers,
        spmm_columns,
        spmm_kernels,
        spmm_floats,
        spmm_dense,
        sddmm,
        sddmm_floats,
        made,
        gradients,
    ):
        family(recorder)
