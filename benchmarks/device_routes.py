"""The fused kernel's two ways to one product, of ``device.py``: columns one by one, or by a matrix product.

The Triton engine chooses by counted instructions; this measures whether the choice is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from device_items import Results, compiled_by_processes, timed
from matvec_cells import Cell, Contestant, Problem

NAMES = {"columns": "one by one", "matrix": "by a matrix product"}


def routes(what: Results, device: torch.device, directory: Path) -> Results:
    """Seconds and errors of square products by every route that so many columns may take, and what the rule takes."""
    from sketchgp.operators.engines import TRITON

    absent = TRITON.absent(device, torch.float32)
    if absent is not None:
        return {"left_out": absent}
    from sketchgp.operators.engines.triton.launch import MOST_SINGLE

    cases = [(d, t, route) for d in what["d"] for t in what["columns"] for route in NAMES
             if t <= {"columns": MOST_SINGLE, "matrix": 64}[route]]  # fmt: skip
    if what["processes"] and device.type == "cuda":
        compiled_by_processes(_compile_one, cases, what["processes"])
    found: Results = {"runs": []}
    problems: dict[tuple[int, int], Problem] = {}
    for d, t, route in cases:
        if (d, t) not in problems:
            problems = {(d, t): Problem(Cell("rbf", d, t, "float32", what["n"]), device, 0)}
        problem = problems[d, t]
        prepare = functools.partial(product_by, problem, route)
        run = {"d": d, "t": t, "route": route, "chosen": _chosen(problem) == route}
        found["runs"].append(run | timed(Contestant("triton", "product", "square", prepare), problem, device))
    return found


def product_by(problem: Problem, route: Any, n: int) -> Callable[[], torch.Tensor]:
    from sketchgp.operators.engines.triton.launch import multiply

    matrix = problem.operator("triton", n, "square").detach()
    prepared, v = matrix.pairs.prepared(), problem.v[:n]
    return lambda: multiply(matrix.expression, prepared, n, v, True, "float32", route=route)


def _chosen(problem: Problem) -> str:
    from sketchgp.operators.engines.triton.launch import _Problem

    matrix = problem.operator("triton", 2, "square").detach()
    plan = _Problem(matrix.expression, matrix.pairs.prepared(), "float32").plan(True, problem.cell.t)
    return "matrix" if plan.dot else "columns"


def _compile_one(job: tuple[int, int, str]) -> None:
    d, t, route = job
    try:
        product_by(Problem(Cell("rbf", d, t, "float32", 300), torch.device("cuda"), 0), route, 300)()
    except Exception:  # what is measured afterwards says why
        return
