"""The arithmetic of benchmarks/matvec.py: what the limit is, and which fraction of it a speed is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def limit_module(monkeypatch):
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not beside the tests")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import matvec_limit

    yield matvec_limit
    for name in ("matvec_limit", "common"):
        sys.modules.pop(name, None)


def test_limits_by_hand(limit_module):
    rates = limit_module.Rates(product=100e9, exponential=5e9, root=10e9, logarithm=1e9)
    found = limit_module.limits(limit_module.Work(roots=1), d=8, t=16, rates=rates)
    # (2 * 8 + 2 * 16) / 100 + 1 / 5 = 0.48 + 0.2 nanoseconds a pair, and 0.1 for the root
    assert found["plain"] == pytest.approx(1e9 / 0.68)
    assert found["root"] == pytest.approx(1e9 / 0.78)
    # each pair once: (8 + 2 * 16) / 100 + 0.5 / 5
    assert found["symmetric"] == pytest.approx(1e9 / 0.50)
    assert found["symmetric_root"] == pytest.approx(1e9 / 0.55)


def test_limits_of_other_kernels(limit_module):
    rates = limit_module.Rates(product=100e9, exponential=5e9, root=10e9, logarithm=1e9)
    work = limit_module.Work(flops=4, exponentials=2, logarithms=1)
    found = limit_module.limits(work, d=10, t=1, rates=rates)
    assert found["plain"] == pytest.approx(1e9 / (0.42 + 0.4))
    assert found["root"] == pytest.approx(1e9 / (0.42 + 0.4 + 1.0))


def test_symmetric_fractions_only_for_square(limit_module):
    limit = {"plain": 2.0, "root": 1.0, "symmetric": 4.0, "symmetric_root": 3.0}
    rectangular = limit_module.fractions(1.0, limit, square=False)
    assert rectangular == {"fraction_of_limit": 0.5, "fraction_of_limit_with_root": 1.0}
    square = limit_module.fractions(3.0, limit, square=True)
    assert square["fraction_of_limit"] == 1.5
    assert square["fraction_of_symmetric_limit"] == 0.75
    assert square["fraction_of_symmetric_limit_with_root"] == 1.0


def test_rates_are_raised_but_never_lowered(limit_module):
    record = {"product": 10.0, "exponential": 4.0, "root": 3.0, "logarithm": 2.0}
    rates = limit_module.rates_of(record, {"product": 0.5, "exponential": 1.5})
    assert rates == limit_module.Rates(product=10.0, exponential=6.0, root=4.5, logarithm=3.0)
