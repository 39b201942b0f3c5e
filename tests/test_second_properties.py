"""Random problems of every kind, each answer compared with a dense one in extended precision.

It was written from the documentation alone, by somebody who had not read ``test_properties.py``: the two do not share
their strategies, references or tolerances.  What is drawn and asked is in ``second_cases.py``, the references are in
``second_reference.py``.  A failing case prints the command that runs it again.

``SKETCHGP_SECOND_CASES=10000`` runs so many cases, an hour or so on one core; ``SKETCHGP_SECOND_SEED=1`` draws others.
"""

from __future__ import annotations

import os

import gpytorch
import numpy as np
import pytest

import second_cases
import second_reference
from second_reference import LONG

CASES = int(os.environ.get("SKETCHGP_SECOND_CASES", "12"))
SEED = int(os.environ.get("SKETCHGP_SECOND_SEED", "0"))
TOTAL = sum(weight for _, weight in second_cases.KINDS.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", second_cases.KINDS)
def test_every_answer_is_right_or_warned_of_or_refused(kind):
    """Run the cases of one kind, and list every fault of them."""
    faults = []
    for index in range(max(1, CASES * second_cases.KINDS[kind][1] // TOTAL)):
        try:
            second_cases.run(SEED, index, kind)
        except second_cases.Fault as fault:
            faults.append(str(fault))
    assert not faults, "\n".join(faults)


def test_what_a_factorization_misses_may_be_refused():
    """A constant kernel, whose weights cancel, with targets far above the noise; and none so far."""
    kernel, mean = gpytorch.kernels.ConstantKernel().double(), gpytorch.means.ZeroMean()
    x, y = np.arange(9.0)[:, None], np.arange(9.0)
    for size, lost in ((1e8, True), (1.0, False)):
        dense = second_reference.Dense(kernel, mean, x.astype(LONG), size * y.astype(LONG), LONG(1e-9))
        assert dense.condition < second_cases.HARD
        assert (dense.at(x[:1].astype(LONG)).mean_by_float64 > 0.05 * 1e-9**0.5).all() == lost


def test_a_far_wave_moves_its_covariances_with_near_points():
    """Round a far point's phase in one covariance alone: that is off by all of it, and the near variance by none."""
    kernel, mean = gpytorch.kernels.CosineKernel().double(), gpytorch.means.ZeroMean()
    kernel.period_length = np.pi
    x, points, phases = np.arange(9.0)[:, None], np.array([[0.3], [77.7]], LONG), np.array([0.0, 1e-7])
    dense = second_reference.Dense(kernel, mean, x.astype(LONG), x[:, 0].astype(LONG), LONG(1e-6))
    rounding = dense.at(points, phases=phases).covariance_rounding
    prior, moved = (second_reference.covariance(kernel, points, points + by) for by in (0, phases[:, None]))
    off = float(np.abs(moved - prior)[0, 1])
    assert np.sqrt(rounding[0, 0] * rounding[1, 1]) < off < rounding[0, 1]


def test_a_wrong_answer_is_a_fault():
    """Hold a value that is off, and a bound that is exceeded, against the truth."""
    case = second_cases.Case(0, 0)
    case.close("near", [1.0, 2.0], [1.001, 2.0], 0.01)
    with pytest.raises(second_cases.Fault, match="off by"):
        case.close("far", [1.1, 2.0], [1.0, 2.0], 0.01)
    with pytest.raises(second_cases.Fault, match="above the bound"):
        case.below("bound", [1e-3], [1e-4])
    case.warned = ["a warning"]
    case.close("warned", [1.1, 2.0], [1.0, 2.0], 0.01)
    with pytest.raises(second_cases.Fault, match="not finite"):
        case.close("nan", [float("nan")], [1.0], 0.01)
