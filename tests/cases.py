"""Cases of a test: all of them in one test, or as few as hold every pair of values."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch


def each(names: str | Sequence[str], values: Iterable[Any], ids: Any = None) -> Callable[[Callable], Callable]:
    """Run a test for each of some values, as ``pytest.mark.parametrize`` does, but as one test.

    It is for checks of milliseconds, where a test of its own for each case would take longer than the check.  Each case
    starts from the same seed.  The first that fails ends the test, which says the case.

    :param ids: accepted where it was written for ``parametrize``; failures show the values.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [_values(case, len(names)) for case in values]

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            for case in cases:
                torch.manual_seed(0)
                chosen = dict(zip(names, case, strict=True))
                try:
                    test(*args, **fixtures, **chosen)
                except pytest.skip.Exception:
                    continue
                except Exception as error:
                    raise AssertionError(f"case {chosen!r}: {type(error).__name__}: {error}") from error

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


def _values(case: Any, count: int) -> tuple[Any, ...]:
    if hasattr(case, "values") and hasattr(case, "marks"):
        assert not case.marks, "a case with a mark needs a test of its own"
        return tuple(case.values)
    return (case,) if count == 1 else tuple(case)


def pairwise(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations of values in which each value of a list meets each value of every other list.

    For the values of ``parametrize``, where all combinations would take too long.
    """
    values = [list(one) for one in lists]
    every = list(itertools.product(*map(range, map(len, values))))
    places = list(itertools.combinations(range(len(lists)), 2))
    pairs = {case: {(i, j, case[i], case[j]) for i, j in places} for case in every}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(every, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [tuple(one[place] for one, place in zip(values, case, strict=True)) for case in sorted(chosen)]
