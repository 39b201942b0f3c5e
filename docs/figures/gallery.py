"""Runs the tutorial and the examples, and keeps what they draw and print: ``python docs/figures/gallery.py [NAME]``.

Pictures go beside this file. What the blocks of ``docs/tutorial.md`` print goes into ``tutorial.json`` and, below each
block, into the page. ``SKETCHGP_DATA`` names the directory of QM7 and of the land surface temperatures.
"""

import contextlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import gpytorch
import matplotlib.pyplot as plt
import torch

import sketchgp
import sketchgp.plotting
from sketchgp.datasets import load_diamonds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = os.environ.get("SKETCHGP_DATA", "")
EXAMPLES = {  # with their arguments
    "classification": ["--rows", "5000", "--features", "1024"],
    "compare_solvers": ["--rows", "2000", "--seconds", "10"],
    "huge_mean": ["--rows", "8000", "--seconds", "4"],
    "molecules": ["--rows", "2000", "--data", f"{DATA}/qm7_atomization_cm.npz"],
    "series_with_gaps": [],
    "spatial_map": [],
    "tune_on_all_rows": ["--rows", "4000", "--iterations", "8"],
}


def example(name: str) -> None:
    """Runs one, in the folder that it finds itself in."""
    sys.argv = [name, *EXAMPLES[name], "--picture", str(HERE / f"{name}.png")]
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def plotting() -> None:
    """What each function of ``sketchgp.plotting`` draws, on 2,000 diamonds."""
    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[:3000]
    x, y = data.x[order], data.y[order].log()
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    train_x, train_y, test_x, test_y = x[:2000], y[:2000], x[2000:], y[2000:]

    def model(x: torch.Tensor, y: torch.Tensor) -> Diamonds:
        return sketchgp.accelerate(Diamonds(x, y, gpytorch.likelihoods.GaussianLikelihood()).double())

    tuned = model(train_x, train_y)
    history = sketchgp.fit(tuned, iterations=40)
    problem = sketchgp.FullProblem(tuned.covar_module, train_x, train_y, tuned.likelihood.noise.detach())
    choices = [sketchgp.ConjugateGradients(), sketchgp.ASkotch(max_passes=60), sketchgp.Cholesky()]
    solved = [choice.solve(problem) for choice in choices]
    line = model(train_x[:150, :1], train_y[:150])
    sketchgp.fit(line)
    figure = plt.figure(figsize=(13.8, 11.6), layout="constrained")
    axes = [part.subplots() for part in figure.subfigures(3, 2).flat]
    sketchgp.plotting.convergence(solved, axes[0])
    sketchgp.plotting.solvers(solved, axes[1])
    sketchgp.plotting.spectrum(solved[0], ax=axes[2])
    sketchgp.plotting.hyperparameters(history, axes[3], names=["lengthscale", "noise"])
    sketchgp.plotting.posterior(line, axes[4])
    sketchgp.plotting.calibration(sketchgp.predict(tuned, test_x), test_y, axes[5])
    figure.savefig(HERE / "plotting.png", dpi=115)


class Diamonds(gpytorch.models.ExactGP):
    def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[-1])
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def tutorial() -> None:
    """Runs the page block by block and writes what each prints below it."""
    page = ROOT / "docs" / "tutorial.md"
    text, names, printed = page.read_text(encoding="utf-8"), {"__name__": "tutorial"}, []

    def run(match: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(match["code"], names)
        lines = [part for line in output.getvalue().splitlines() for part in textwrap.wrap(line, 88)]
        printed.append(lines)
        return f"```python\n{match['code']}```\n" + ("\n```text\n" + "\n".join(lines) + "\n```\n" if lines else "")

    blocks = r"^```python\n(?P<code>.*?)^```\n(\n```text\n.*?^```\n)?"
    text = re.sub(blocks, run, text, flags=re.DOTALL | re.MULTILINE)
    Path("tutorial.png").replace(HERE / "tutorial.png")
    about = {"torch": torch.__version__, "sketchgp": sketchgp.__version__, "threads": torch.get_num_threads()}
    (HERE / "tutorial.json").write_text(json.dumps({**about, "printed": printed}, indent=1) + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    pages = {"tutorial": tutorial, "plotting": plotting}
    wanted = sys.argv[1:] or [*pages, *EXAMPLES]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for each in wanted:
            print(f"=== {each}")
            pages[each]() if each in pages else example(each)
