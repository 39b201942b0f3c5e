"""A posterior mean on more rows than a factor fits for: ASkotch, stopped by the clock, and gone on with from its file.

Run it with ``python examples/huge_mean.py``; it takes a minute on one core and reads the diamonds that come with the
package. ``--rows`` sets how many of them, ``--seconds`` when to stop first, ``--picture FILE`` draws.
"""

import argparse
import warnings

import gpytorch
import torch

import sketchgp
from sketchgp.datasets import load_diamonds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=20_000, help="training rows (default: 20,000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="when the first run is stopped (default: 10)")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()
    rows = arguments.rows

    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: rows + 1000]
    x, y = data.x[order], data.y[order].log()
    x = ((x - x[:rows].mean(0)) / x[:rows].std(0)).float()
    y = ((y - y[:rows].mean()) / y[:rows].std()).float()
    held_out = x[rows:], y[rows:]

    # Hyperparameters of an earlier fit; see tune_on_all_rows.py.
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
    kernel.base_kernel.lengthscale, kernel.outputscale = 3.0, 1.0
    problem = sketchgp.FullProblem(kernel, x[:rows], y[:rows], noise=0.03)

    # A solve that was stopped, by the clock here, by Ctrl-C or a crash elsewhere, warns and leaves its file.
    solver = sketchgp.ASkotch(tol=1e-2, max_seconds=arguments.seconds, checkpoint="mean.pt", every=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
        first = solver.solve(problem, held_out=held_out)
    print(first.report)

    # The same choices with more time go on from the file, to the bits that one long run would end with.
    later = sketchgp.ASkotch(tol=1e-2, max_seconds=3600, checkpoint="mean.pt", every=5.0)
    solution = later.solve(problem, held_out=held_out)
    print(solution.report)
    course = solution.report.held_out
    print(f"held-out RMSE {course[0].error.item():.3f} after {course[0].passes:.1f} passes, "
          f"{course[-1].error.item():.3f} after {course[-1].passes:.1f}")  # fmt: skip
    if arguments.picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(5, 3.4))
        axes.plot([one.passes for one in course], [one.error.item() for one in course], marker=".")
        axes.axvline(first.report.work["passes"], color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="passes over the kernel matrix", ylabel="RMSE of held-out rows")
        figure.tight_layout()
        figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
