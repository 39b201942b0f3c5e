"""One system, every solver: what they do is collected by ``record_solves``, and drawn.

Run it with ``python examples/compare_solvers.py``; it takes half a minute on one core and reads the diamonds that come
with the package. ``--rows`` sets how many of them, ``--picture FILE`` draws.
"""

import argparse
import warnings

import gpytorch
import torch

import sketchgp
from sketchgp.datasets import load_diamonds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=3000, help="rows (default: 3,000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="the most for one solver (default: 20)")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()

    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: arguments.rows]
    x, y = data.x[order], data.y[order].log()
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    kernel = gpytorch.kernels.MaternKernel(nu=2.5).double()
    kernel.lengthscale = 3.0
    problem = sketchgp.FullProblem(kernel, x, y, noise=0.01)

    limit = {"max_seconds": arguments.seconds}
    solvers = {
        "conjugate gradients, RPCholesky": sketchgp.ConjugateGradients(tol=1e-4, **limit),
        "conjugate gradients alone": sketchgp.ConjugateGradients(tol=1e-4, max_iterations=300, **limit),
        "ASkotch": sketchgp.ASkotch(tol=1e-4, **limit),
        "Skotch": sketchgp.Skotch(tol=1e-4, **limit),
        "EigenPro 2": sketchgp.EigenPro2(tol=1e-4, **limit),
        "Cholesky": sketchgp.Cholesky(),
    }
    with sketchgp.record_solves() as solves, warnings.catch_warnings():
        warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)  # the reports say so, too
        for name, solver in solvers.items():
            more = {"preconditioner": None} if name.endswith("alone") else {}
            solver.solve(problem, **more)

    # A report has the true residual at the end, the course on the way, the work, the time and why the solve ended.
    for name, report in zip(solvers, solves, strict=True):
        seconds = report.setup_seconds + report.seconds
        print(f"{name:32} residual {report.max_residual:.1e} after {seconds:5.2f} s: {report.reason}")
    print(solves[0])

    if arguments.picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(6, 3.8))
        for name, report in zip(solvers, solves, strict=True):
            seconds = report.setup_seconds + report.seconds
            times = torch.linspace(report.setup_seconds, seconds, len(report.history))
            (line,) = axes.plot(times, report.history.amax(dim=1), linewidth=1.2, label=name)
            axes.plot([seconds], [report.max_residual], "o", color=line.get_color(), fillstyle="none")
        axes.set(xscale="log", yscale="log", ylabel="relative residual", xlabel="seconds; ring: true residual")
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
