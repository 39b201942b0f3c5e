"""What the library says when it is asked, or unasked: warnings at the caller's line, advice that can be followed,
representations that fit on a line, and pages of short sentences."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from gp_models import iterative, rbf
from problems import normal, points
from sketchgp.errors import warn

N, M = 120, 12
PACKAGE = Path(sketchgp.__file__).parent


def _kernel() -> ScaleKernel:
    return ScaleKernel(MaternKernel(nu=0.5)).double()


FULL = sketchgp.FullProblem(_kernel(), points(N), normal(N), 1e-3)
INDUCING = sketchgp.InducingPointProblem(_kernel(), points(N), normal(N), 1e-6, points(M, seed=1))
UNFINISHED = {  # solvers that end before their tolerance, each by a reason of its own
    "ran out of iterations": sketchgp.ConjugateGradients(tol=1e-10, max_iterations=1),
    "ran out of passes": sketchgp.ASkotch(tol=1e-10, max_passes=1, block_size=20),
    "ran out of time": sketchgp.Skotch(tol=1e-10, max_seconds=1e-9, block_size=20),
    "ran out of iterations (KRILL)": sketchgp.KRILL(tol=1e-14, max_iterations=1),
    "ran out of iterations (Falkon)": sketchgp.Falkon(tol=1e-14, max_iterations=1),
    "ran out of epochs": sketchgp.SketchySAGA(tol=1e-10, max_epochs=1),
}


def _solve(solver: Any, **options: Any) -> sketchgp.Solution:
    full = isinstance(solver, sketchgp.ConjugateGradients | sketchgp.solvers.BlockSolver)
    return solver.solve(FULL if full else INDUCING, **options)


# --- where warnings point ---------------------------------------------------------------------------------------


def _line() -> int:
    """Of the caller."""
    frame = inspect.currentframe()
    assert isinstance(frame, FrameType) and frame.f_back is not None
    return frame.f_back.f_lineno


def _poor() -> tuple[Any, torch.Tensor]:
    """An accelerated model whose solves end early, with test inputs."""
    model, (xt,) = rbf()
    solver = sketchgp.ConjugateGradients(tol=1e-9, max_iterations=1)
    return sketchgp.accelerate(model.double(), solver=solver, preconditioner=None).eval(), xt.double()


def test_warnings_point_at_the_line_of_the_caller():
    model, xt = _poor()
    wanted: list[int] = []
    with warnings.catch_warnings(record=True) as caught, iterative():
        warnings.simplefilter("always")

        def told() -> None:
            assert caught and all(issubclass(one.category, sketchgp.ConvergenceWarning) for one in caught)
            assert {(one.filename, one.lineno) for one in caught} == {(__file__, wanted[-1])}
            caught.clear()

        _, wanted = model(xt).mean, [_line()]
        told()
        model._clear_cache()
        _, wanted = sketchgp.predict(model, xt, variance="exact"), [_line()]
        told()
        _, wanted = sketchgp.fit(model, iterations=1), [_line()]
        told()
        model.train()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        _, wanted = mll(model(*model.train_inputs), model.train_targets).backward(), [_line()]
        told()
        for solver in UNFINISHED.values():
            problem = (
                FULL if isinstance(solver, sketchgp.ConjugateGradients | sketchgp.solvers.BlockSolver) else INDUCING
            )
            _, wanted = solver.solve(problem), [_line()]
            told()
        solver = sketchgp.EigenPro4(epochs=2)
        _, wanted = solver.solve(INDUCING, callback=lambda epoch: True), [_line()]
        told()
        sparse = sketchgp.InducingPointGP(
            points(N), normal(N), gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ZeroMean(), _kernel(),
            points(M, seed=1), solver=sketchgp.KRILL(tol=1e-14, max_iterations=1),
        ).double().eval()  # fmt: skip
        _, wanted = sparse(points(3)).mean, [_line()]
        told()


def test_a_warning_where_every_frame_is_of_a_library():
    """As in a worker that a library started: it is given all the same."""
    scope: dict[str, Any] = {"__name__": "torch.somewhere", "warn": warn}
    exec("def run(): warn('all the same')", scope)
    with pytest.warns(UserWarning, match="all the same"):
        scope["run"]()


# --- advice -----------------------------------------------------------------------------------------------------

CHOICES = {name for name in dir(sketchgp) if dataclasses.is_dataclass(getattr(sketchgp, name))}
PARAMETERS = {  # of every solver and preconditioner there is
    field.name for name in CHOICES for field in dataclasses.fields(getattr(sketchgp, name)) if "_" in field.name
} | {"rank", "checkpoint", "mu", "tol"}


@pytest.mark.parametrize("reason", UNFINISHED)
def test_advice_names_what_the_solver_has(reason):
    """Of solves that really end so; for all solvers and reasons see ``test_solver_contract.py``."""
    solver = UNFINISHED[reason]
    with pytest.warns(sketchgp.ConvergenceWarning) as caught:
        report = _solve(solver).report
    advice = str(caught[0].message).split(". ", maxsplit=1)[1]
    assert report.reason == reason.split(" (")[0]
    advised = PARAMETERS & set(re.findall(r"\w+", advice))
    own = {field.name for field in dataclasses.fields(solver)}
    own |= {"rank"} if isinstance(solver, sketchgp.ConjugateGradients) else set()  # of the preconditioner
    assert advised and advised <= own


def test_a_solve_that_is_stopped_is_said_to_return_something_to_go_on_from():
    with pytest.warns(sketchgp.ConvergenceWarning, match=r"Go on from the value returned with initial=\."):
        solution = _solve(sketchgp.ConjugateGradients(tol=1e-10), preconditioner=None, callback=lambda iterate: True)
    assert "last iterate" not in solution.report.advice()


def test_a_constant_that_diverges_is_told_to_leave_it():
    problem = sketchgp.FullProblem(ScaleKernel(RBFKernel()).double(), points(100, 2), normal(100), 1e-4)
    with pytest.raises(sketchgp.NumericalError, match=r"ASkotch diverges: .*mu=None, or choose a larger one"):
        sketchgp.ASkotch(block_size=20, mu=1e-10, max_passes=200, tol=1e-6).solve(problem)


def test_growth_is_told_from_a_number():
    """A residual that overflows before the first estimate grew from that of the start."""
    problem = sketchgp.FullProblem(_kernel(), points(N), normal(N), 1e-3)

    class Explodes(sketchgp.ASkotch):
        def method(self, system: Any, block_size: int) -> Any:
            method = super().method(system, block_size)
            step = method.step

            def larger(r: torch.Tensor, generator: torch.Generator) -> Any:
                rows, g = step(r, generator)
                return rows, 1e6 * g

            method.step = larger
            return method

    with pytest.raises(sketchgp.NumericalError, match=r"grew from 1\.0e\+00 to \d"):
        Explodes(block_size=20).solve(problem)


# --- representations --------------------------------------------------------------------------------------------


def test_representations_are_short_and_aligned():
    solution = _solve(sketchgp.ConjugateGradients())
    model, (xt,) = rbf()
    sketchgp.accelerate(model.double())
    with iterative():
        history = sketchgp.fit(model, iterations=2)
        prediction = sketchgp.predict(model, xt.double())
    for thing, parts in (
        (solution, ("Solution: 120 values, float64 on cpu", "ConjugateGradients, converged", "RPCholesky, rank")),
        (solution.report, ("SolveReport: ConjugateGradients, converged", "residual  ", " s set-up")),
        (
            history,
            ("FitHistory: 180 rows, by lbfgs, objective probes", "loss  ", "steps     2, ", "ran all iterations"),
        ),
        (prediction, (f"Prediction: {len(xt)} points, float64 on cpu", "variances      exact", "ConjugateGradients")),
    ):
        text, table = repr(thing), thing._repr_html_()
        title, *lines = text.split("\n")
        assert len(lines) < 14 and max(map(len, lines)) <= 112 and "tensor(" not in text
        assert all(part in text for part in parts), text
        column = len(lines[0]) - len(lines[0][2:].split("  ", 1)[1].lstrip())
        assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines), text
        assert (
            table.startswith("<table>")
            and title in table
            and table.count("<tr>") == text.count("\n  ") - sum(line.startswith("    ") for line in lines)
        )


def test_a_model_shows_its_choices():
    model, _ = rbf()
    plain = repr(model.double())
    sketchgp.accelerate(model, sketchgp.RPCholesky(rank=7), solver=sketchgp.ASkotch(max_passes=9.0))
    text = repr(model)
    rows = f"{len(model.train_targets)} x {model.train_inputs[0].shape[1]}, float64 on cpu"
    for part in (rows, "preconditioner  RPCholesky(rank=7)\n", "solver          ASkotch(max_passes=9.0)\n"):
        assert part in text, text
    assert repr(sketchgp.restore(model)) == plain


def test_the_rank_of_a_report_is_that_of_the_note():
    """What is noted of an automatic choice bounds the rank that is used, and the text has both."""
    model, (xt,) = rbf()
    sketchgp.accelerate(model.double()).eval()
    with iterative(), sketchgp.record_solves() as solves, gpytorch.settings.skip_posterior_variances():
        model(xt.double())
    report = solves[0]
    noted = int(re.search(r"a preconditioner of a rank of up to (\d+)", report.notes[0]).group(1))  # type: ignore[union-attr]
    assert report.rank <= noted <= report.n
    assert noted == sketchgp.RPCholesky().rank_for(report.n, torch.device("cpu"))
    assert f"RPCholesky, rank {report.rank})" in str(report)


def test_every_product_of_the_fused_kernel_names_its_precision():
    """Triton's default has changed between versions."""
    sources = [path.read_text(encoding="utf-8") for path in (PACKAGE / "operators/engines/triton").glob("*.py")]
    products = [call for source in sources for call in re.findall(r"tl\.dot\(.*\)", source)]
    assert len(products) == 4 and all("input_precision=" in call for call in products)


# --- pages ------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/methods/*.md")),
    *sorted(ROOT.glob("docs/experiments/*.md")),
]
LEFT_OUT = re.compile(r"```.*?```|\$\$.*?\$\$|^[#|!][^\n]*", flags=re.DOTALL | re.MULTILINE)  # blocks, headings, tables
ONE_WORD = re.compile(r"`[^`]*`|\$[^$]*\$|(?<!\w)\*[^*]+\*")  # code, formulas, titles of papers
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"\n\s*\n|\n\s*(?=(?:-|\d+\.)\s)|(?<=[.?!:])\)?\s+")  # of a paragraph, an item of a list, a sentence


def too_long(text: str) -> Iterator[str]:
    """Yield the sentences of more than 25 words in the prose of a page."""
    prose = LINK.sub(r"\1", ONE_WORD.sub("code", LEFT_OUT.sub("\n", text).replace("**", "")))
    for sentence in END.split(prose):
        words = sentence.split()
        if sum(any(letter.isalnum() for letter in word) for word in words) > 25:
            yield " ".join(words)


def test_sentences_of_the_pages_are_short():
    for page in PAGES:
        found = list(too_long(page.read_text(encoding="utf-8")))
        assert not found, f"{page.relative_to(ROOT)} has sentences of more than 25 words: {found}"


LONGEST = {"results.md": 2_500, "papers.md": 3_000}  # words; others at most as many as are read in ten minutes
MOST = 2_000


def test_pages_are_not_too_long():
    """What needs more room has a page of its own, in docs/experiments if it was measured."""
    for page in PAGES:
        words = sum(any(map(str.isalnum, word)) for word in page.read_text(encoding="utf-8").split())
        assert words <= LONGEST.get(page.name, MOST), f"{page.relative_to(ROOT)} has {words} words"


def test_words_of_a_page_are_counted():
    """Code, formulas and links count by what is read; blocks, headings and tables do not count."""
    longest = "one `two of code` [three four](five.md) $6 + 6$ *seven of a title* " + "word " * 18 + "last"
    assert not list(too_long(f"# {'word ' * 30}\n{longest}. {longest}\n- {longest}\n\n| {'word ' * 30} |\n"))
    assert list(too_long(f"- {longest} more - .")) == [f"- one code three four code code {'word ' * 18}last more - ."]
