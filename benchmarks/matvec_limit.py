"""The machine's limit for products with a kernel matrix: rates measured by torch, and what they allow.

A pair (x, z) costs at least the arithmetic of its squared distance (2 d flops, as one matrix product gives it), of
its share of the product (2 t flops for t columns) and one exponential.  With the measured rates of a large matrix
product and of the fastest exponential, both on the device, dtype and threads of the benchmark,

    limit in pairs a second = 1 / ((2 d + 2 t) / matrix-product rate + 1 / exponential rate).

Three variants stand beside it, each named in full wherever it appears: with the root (Matern) or the logarithm
(rational quadratic) counted as well; for a symmetric matrix, where a pair and its mirror image share distance and
exponential, 1 / ((d + 2 t) / matrix-product rate + 0.5 / exponential rate); and both together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import median

Timed = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """The least work for one entry of a kernel matrix.

    :ivar flops: flops an input dimension, at the rate of the matrix product.  Squared Euclidean distance: 2.  l1
        distance: 4, since subtraction and addition are one instruction each and a fused multiply-add, which
        counts as two flops in the matrix product's rate, is one too (the magnitude is taken to be free).
    :ivar exponentials: of them, how many.
    :ivar roots: (inverse) square roots, counted only where "root" is said.
    :ivar logarithms: likewise.
    """

    flops: float = 2.0
    exponentials: float = 1.0
    roots: float = 0.0
    logarithms: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Operations a second: flops of a matrix product, exponentials, roots, logarithms."""

    product: float
    exponential: float
    root: float
    logarithm: float


def limits(work: Work, d: int, t: int, rates: Rates) -> dict[str, float]:
    """Pairs a second that the rates allow: ``plain``, ``root``, ``symmetric`` and ``symmetric_root``."""
    distance = work.flops * d / rates.product
    columns = 2 * t / rates.product
    exponential = work.exponentials / rates.exponential
    root = work.roots / rates.root + work.logarithms / rates.logarithm
    return {
        "plain": 1 / (distance + columns + exponential),
        "root": 1 / (distance + columns + exponential + root),
        "symmetric": 1 / (0.5 * distance + columns + 0.5 * exponential),
        "symmetric_root": 1 / (0.5 * distance + columns + 0.5 * (exponential + root)),
    }


def fractions(pairs_per_second: float, limit: dict[str, float], square: bool) -> dict[str, float]:
    """``fraction_of_limit`` and ``fraction_of_limit_with_root``; for a square matrix the two symmetric ones too.

    A symmetric product may exceed 1 in the first two, which charge it for both halves of the matrix.
    """
    found = {
        "fraction_of_limit": pairs_per_second / limit["plain"],
        "fraction_of_limit_with_root": pairs_per_second / limit["root"],
    }
    if square:
        found |= {
            "fraction_of_symmetric_limit": pairs_per_second / limit["symmetric"],
            "fraction_of_symmetric_limit_with_root": pairs_per_second / limit["symmetric_root"],
        }
    return found


# ------------------------------------------------------------------------------------------ measurement
def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_a_call(call: Timed, device: torch.device, repeats: int, least: float = 2e-3) -> float:
    """Median seconds of one call; short calls are timed in groups that last ``least`` seconds."""
    call()
    synchronise(device)
    started = time.perf_counter()
    call()
    synchronise(device)
    group = max(1, int(least / max(time.perf_counter() - started, 1e-7)))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(group):
            call()
        synchronise(device)
        times.append((time.perf_counter() - started) / group)
    return median(times) or float("inf")


def _inverse_root(x: Tensor, out: Tensor) -> Tensor:
    return torch.pow(x, -0.5, out=out)


FUNCTIONS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "exponential": {"torch.exp": torch.exp, "torch.exp2": torch.exp2},
    "root": {"torch.sqrt": torch.sqrt, "torch.rsqrt": torch.rsqrt, "torch.pow(x, -0.5)": _inverse_root},
    "logarithm": {"torch.log": torch.log, "torch.log2": torch.log2},
}


def product_call(size: int, dtype: torch.dtype, device: torch.device) -> Timed:
    """A square matrix product of that size; ``2 size^3`` flops."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def function_call(group: str, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Timed:
    """An elementwise function on ``size`` entries, input and output in buffers of their own."""
    x = torch.rand(size, dtype=dtype, device=device).mul_(-20 if group == "exponential" else 20)
    if group != "exponential":
        x += 0.1
    out, function = torch.empty_like(x), FUNCTIONS[group][name]
    return lambda: function(x, out=out)


def _device_rates(dtype: torch.dtype, device: torch.device) -> tuple[dict[str, dict[str, float]], str | None]:
    """Rates of functions whose operands stay in registers, which torch alone cannot give on a CUDA device."""
    if device.type != "cuda":
        return {}, None
    try:
        from matvec_device import register_rates

        return register_rates(dtype, device), None
    except Exception as problem:  # no Triton, or one that does not know the device: torch's rates remain
        return {}, f"{type(problem).__name__}: {str(problem).splitlines()[0][:200] if str(problem) else ''}"


def measure(dtype: torch.dtype, device: torch.device, quick: bool = False) -> dict[str, Any]:
    """The rates, each the best over sizes of the median over repeats, with what gave it and all that was tried."""
    cuda = device.type == "cuda"
    if quick:
        sizes, lengths, repeats = [512, 1024], [2**16], 3
    elif cuda:
        sizes, lengths, repeats = [4096, 8192, 16384], [2**k for k in range(18, 27, 2)], 9
    else:
        sizes, lengths, repeats = [1024, 2048, 4096], [2**k for k in range(14, 20)], 9
    threads = 1 if cuda else torch.get_num_threads()
    tried: dict[str, Any] = {"product": {}}
    for size in sizes:
        seconds = seconds_a_call(product_call(size, dtype, device), device, min(repeats, 5))
        tried["product"][str(size)] = 2 * size**3 / seconds
    best = max(tried["product"], key=lambda size: tried["product"][size])
    record: dict[str, Any] = {"product": tried["product"][best], "product_by": f"torch.mm, {best} x {best}"}
    registers, problem = _device_rates(dtype, device)
    for group, functions in FUNCTIONS.items():
        tried[group] = {}
        for name in functions:
            for length in lengths:
                entries = length * threads
                seconds = seconds_a_call(function_call(group, name, entries, dtype, device), device, repeats)
                tried[group][f"{name}, {entries} entries"] = entries / seconds
        tried[group] |= registers.get(group, {})
        best = max(tried[group], key=lambda name: tried[group][name])
        record |= {group: tried[group][best], f"{group}_by": best}
    if cuda and dtype == torch.float32:
        record["product_tf32"] = _tf32_rate(sizes[-1], device)  # for information; no limit is made of it
    if problem:
        record["registers"] = problem
    return record | {"threads": threads, "tried": tried}


def _tf32_rate(size: int, device: torch.device) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return 2 * size**3 / seconds_a_call(product_call(size, torch.float32, device), device, 5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def spot_check(record: dict[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Two of the rates measured again, as a ratio to the run's: above 1, the machine is faster than it was then."""
    size = min(record["tried"]["product"], key=int)
    again = 2 * int(size) ** 3 / seconds_a_call(product_call(int(size), dtype, device), device, 3)
    found = {"product": again / record["tried"]["product"][size]}
    by_torch = {name: rate for name, rate in record["tried"]["exponential"].items() if name.startswith("torch")}
    best = max(by_torch, key=lambda name: by_torch[name])
    name, entries = best.split(", ")[0], int(best.split(", ")[1].split()[0])
    seconds = seconds_a_call(function_call("exponential", name, entries, dtype, device), device, 3)
    return found | {"exponential": entries / seconds / by_torch[best]}


def rates_of(record: dict[str, Any], again: dict[str, float] | None = None) -> Rates:
    """The run's rates; with ``again``, the ratios of :func:`spot_check`, raised where the machine became faster.

    They are never lowered: a machine that others slow down must not make a fraction look better.
    """
    faster = {key: max(1.0, ratio) for key, ratio in (again or {}).items()}
    product, function = faster.get("product", 1.0), faster.get("exponential", 1.0)
    rates = (float(record[key]) for key in ("product", "exponential", "root", "logarithm"))
    return Rates(*(rate * (product if i == 0 else function) for i, rate in enumerate(rates)))
