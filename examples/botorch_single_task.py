"""BoTorch: the posterior of a SingleTaskGP on more points than Cholesky likes, solved by sketchgp.

Run it with ``python examples/botorch_single_task.py``; it takes half a minute on two cores and needs
``python -m pip install botorch``. A SingleTaskGP is a GPyTorch ``ExactGP``, so ``accelerate`` takes it;
``posterior``, ``fit_gpytorch_mll``, acquisition functions and fantasies then use the accelerated solves.
"""

import argparse
import sys

import gpytorch
import torch

import sketchgp

try:
    from botorch.acquisition import UpperConfidenceBound
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
except ImportError:
    sys.exit("This example needs BoTorch: python -m pip install botorch")


def objective(x):
    """Two bumps on the unit square, the taller at (0.7, 0.3): ``(..., 2) -> (..., 1)``."""
    tall = torch.exp(-20 * (x - torch.tensor([0.7, 0.3], dtype=x.dtype)).square().sum(-1, keepdim=True))
    low = torch.exp(-20 * (x - torch.tensor([0.2, 0.8], dtype=x.dtype)).square().sum(-1, keepdim=True))
    return tall + 0.6 * low


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=2500, help="training points (default: 2500)")
    parser.add_argument("--steps", type=int, default=5, help="steps of the fit (default: 5)")
    arguments = parser.parse_args()
    points = arguments.points

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(points, 2, dtype=torch.float64, generator=generator)
    y = objective(x) + 0.05 * torch.randn(points, 1, dtype=torch.float64, generator=generator)

    model = sketchgp.accelerate(SingleTaskGP(x, y))

    # BoTorch's own fitting, a few steps of it: L-BFGS on the marginal likelihood, with the same probes throughout.
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.deterministic_probes(True), sketchgp.record_solves() as solves:
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": arguments.steps}})
    print(f"fitting: {len(solves)} solves, largest residual {max(r.max_residual for r in solves):.1e}")

    candidates = torch.rand(1000, 2, dtype=torch.float64, generator=generator)
    with torch.no_grad(), sketchgp.record_solves() as solves:
        posterior = model.posterior(candidates)
        mean, deviation = posterior.mean, posterior.variance.sqrt()
        upper = UpperConfidenceBound(model, beta=4.0)(candidates.unsqueeze(-2))
    print(f"posterior: mean {tuple(mean.shape)}, largest standard deviation {deviation.max():.3f}")
    best = candidates[upper.argmax()].tolist()
    print(f"next point to try: ({best[0]:.2f}, {best[1]:.2f}); the maximum is near (0.70, 0.30)")
    for report in solves:
        print(report)

    # Condition on ten more points without solving the whole system again.
    new_x = candidates[:10]
    with torch.no_grad():
        fantasy = model.condition_on_observations(new_x, objective(new_x))
        print(f"after ten more points: mean at the first {fantasy.posterior(new_x[:1]).mean.item():.3f}")


if __name__ == "__main__":
    main()
