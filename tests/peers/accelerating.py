"""A pytest plugin: every exact model that a test of GPyTorch's or BoTorch's calls is accelerated at its first call.

It is loaded into a process of its own (``python -m pytest -p accelerating``), whose GPyTorch it may change.
``SKETCHGP_PEERS_MODE`` says how:

- ``plain``: nothing is accelerated; what fails here fails without sketchgp.
- ``default``: accelerated, as users have it: up to 800 points are left to Cholesky, which most tests stay below.
- ``iterative``: accelerated, and sketchgp solves every system, whatever its size.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ExactGP

import sketchgp
from sketchgp.models.accelerated import added_diag, mixins

_peer = importlib.import_module(os.environ["SKETCHGP_PEER"])  # the installed one, before a test finds the checkout's
MODE = os.environ.get("SKETCHGP_PEERS_MODE", "plain")
_plain_call = ExactGP.__call__
_done = {"models": 0}
_stack = contextlib.ExitStack()
_solves = _stack.enter_context(sketchgp.record_solves())


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    ours = isinstance(self, sketchgp.InducingPointGP)
    if not ours and not mixins.is_accelerated(self) and isinstance(self.likelihood, _GaussianLikelihoodBase):
        sketchgp.accelerate(self)
        _done["models"] += 1
        return self(*args, **kwargs)  # whose class is another one now
    return _plain_call(self, *args, **kwargs)


if MODE != "plain":
    ExactGP.__call__ = _call
if MODE == "iterative":
    added_diag.cholesky_points = mixins.cholesky_points = lambda: 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was tested."""
    counts = f"{_done['models']} models accelerated, {len(_solves)} solves"
    terminalreporter.write_line(f"peers: mode {MODE}, {_peer.__name__} {_peer.__version__}, {counts}")
