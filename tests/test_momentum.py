"""The inequality that ASkotch's growing momentum is derived from, with expectations taken over all blocks."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
from problems import identity, normal, points
from sketchgp.solvers.full import blocks as drawn

N, B = 12, 3


def _squared(matrix, e):
    return float((e * (matrix @ e)).sum())


@pytest.mark.parametrize("passes", [0.0, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_the_potential_falls_as_derived(passes, noise, monkeypatch):
    """For a fixed partition, whose blocks are drawn uniformly, nu is n / b, and the mean is over the N / B blocks."""
    problem = sketchgp.FullProblem(ScaleKernel(MaternKernel(nu=1.5)).double(), points(N, 2), normal(N), noise)
    matrix = problem.kernel(problem.x).to_dense().detach() + noise * identity(N)
    solution = torch.linalg.solve(matrix, problem.y.unsqueeze(1))
    blocks, nu = torch.arange(N).split(B), N / B
    inverse = torch.block_diag(*(matrix[rows][:, rows] for rows in blocks)) * nu  # G^-1
    method = sketchgp.ASkotch(block_size=B).method(problem.system("dense"), B)
    mu = (2 / (2 + passes)) ** 2 / nu
    beta = 1 - (mu / nu) ** 0.5
    ratios = []
    for seed in range(5):
        w, v = normal(N, 1, seed=seed), normal(N, 1, seed=seed + 50)
        after = []
        for rows in blocks:
            monkeypatch.setattr(drawn, "next_block", lambda *_, rows=rows: (rows, torch.empty(0, dtype=torch.long)))
            method.begin(1)
            method.tensors |= {"w": w.clone(), "v": v.clone()}
            method.numbers["rows"] = passes * N
            y = method.evaluation_point() - solution
            method.step(problem.y.unsqueeze(1), torch.Generator())
            e_w, e_v = method.tensors["w"] - solution, method.tensors["v"] - solution
            after.append(_squared(inverse, e_v) + _squared(matrix, e_w) / mu)
        before = _squared(inverse, v - solution) + _squared(matrix, w - solution) / mu
        bound = beta * before + (1 - beta) * (_squared(inverse, y) - _squared(matrix, y) / mu)
        mean = sum(after) / len(after)
        assert mean <= bound * (1 + 1e-10)
        ratios.append(mean / bound)
    assert max(ratios) > 0.5  # the bound says something: it is not far above
