"""Variants of one kernel on the same operands: checked in every element, then timed in the same rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import magicube_cutlass as mc
from cute_kernels.sddmm import heuristics
from cute_kernels.sddmm.heuristics import SddmmKernel
from cute_kernels.spmm.heuristics import SpmmKernel
from harness.dlmc_data import of_length
from harness.gpu_data import Product, Widths, check, one_line
from harness.gpu_sddmm import checked_sddmm
from harness.gpu_timing import Call, measure, ratio


@dataclass(frozen=True)
class Variant:
    """One bar: a label, the config or the reason why there is none, and the operands it runs on."""

    label: str
    config: SpmmKernel | SddmmKernel | None
    product: str
    reason: str = ""


@dataclass(frozen=True)
class Study:
    """Variants that are compared with the first one; ``question``: what the study asks."""

    name: str
    question: str
    workload: str
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        """A variant that is the same as one before it goes."""
        unlike: list[Variant] = []
        for variant in self.variants:
            if variant.config is None or all(
                (variant.config, variant.product) != (other.config, other.product) for other in unlike
            ):
                unlike.append(variant)
        object.__setattr__(self, "variants", tuple(unlike))


def changed(label: str, base: SpmmKernel | SddmmKernel, product: str, **changes: object) -> Variant:
    """``base`` with other fields."""
    return Variant(label, replace(base, **changes), product)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sampled:
    """Operands of SDDMM: a pattern, widths, and K."""

    pattern: mc.Pattern
    widths: Widths
    inner: int


@contextmanager
def sampling_with(config: SddmmKernel) -> Iterator[None]:
    """``sddmm`` takes this kernel, which has no argument for it."""
    with patch.object(heuristics, "choose_sddmm", lambda *_, **__: config):
        yield


def checked_call(product: Product | Sampled, config: Any) -> Call:
    """The call with this config, after a comparison of every element."""
    if isinstance(product, Sampled):
        own = of_length(product.pattern, product.pattern.vector_length).to("cuda")  # a pattern keeps its first kernel
        with sampling_with(config):
            return checked_sddmm(product.widths, product.inner, own)[0]
    out = product.poisoned()
    call = partial(mc.spmm, product.lhs, product.rhs, out=out, config=config)
    call()
    check(product, out)
    return call


def run_study(study: Study, products: Mapping[str, Product | Sampled], failed: dict[Any, str]) -> dict[str, Any]:
    """Check every variant in every element, then time those that run in the same rounds."""
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for variant in study.variants:
        if variant.config is None or variant.config in failed:
            reasons[variant.label] = variant.reason or failed[variant.config]
            continue
        try:
            calls[variant.label] = checked_call(products[variant.product], variant.config)
        except Exception as error:  # a variant that does not run is a result
            reasons[variant.label] = one_line(error)
    times = measure(calls, rounds=15, samples=1)
    first = next(iter(times.values()), None)
    rows: list[dict[str, Any]] = []
    for variant in study.variants:
        if variant.label not in times or first is None or variant.config is None:
            rows.append({"label": variant.label, "not_run": reasons[variant.label]})
            continue
        timing = times[variant.label]
        rows.append({"label": variant.label, "us": timing.median, "quartiles": timing.quartiles,
                     "ratio": ratio(timing, first), "mode": timing.mode, "kernel": variant.config.name})  # fmt: skip
    return {"name": study.name, "question": study.question, "workload": study.workload, "rows": rows}


def print_study(result: dict[str, Any]) -> None:
    print(f"  {result['name']}: {result['question']}")
    for row in result["rows"]:
        if "not_run" in row:
            print(f"    {row['label']:26} not run: {row['not_run'][:160]}")
        else:
            print(f"    {row['label']:26} {row['us']:8.2f} us  x{row['ratio']:.2f}  {row['kernel']}", flush=True)
