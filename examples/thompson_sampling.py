"""Bayesian optimization with thousands of evaluations: Thompson sampling, then expected improvement.

Run it with ``python examples/thompson_sampling.py``; it takes about a minute on one core and needs
``python -m pip install botorch``. ``--points`` sets how many evaluations there are to begin with, ``--rounds`` how many
steps of either kind follow.

The function to maximize is Hartmann's of six variables, seen with noise; its largest value is 3.322.
"""

import argparse
import sys

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

import sketchgp

try:
    from botorch.acquisition import qLogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler
    from botorch.test_functions import Hartmann
    from botorch.utils.sampling import optimize_posterior_samples
except ImportError:
    sys.exit("This example needs BoTorch: python -m pip install botorch")

from sketchgp.botorch import PosteriorPathModel

NOISE = 0.1  # standard deviation
hartmann = Hartmann(negate=True, dtype=torch.float64)


def evaluate(x):
    """Noisy values ``(n, 1)`` at x ``(n, 6)``."""
    values = hartmann(x).unsqueeze(-1)
    return values + NOISE * torch.randn_like(values)


def accelerated(x, y, hyperparameters):
    """An accelerated SingleTaskGP on all points, with hyperparameters that are known."""
    model = SingleTaskGP(x, y)
    model.load_state_dict(hyperparameters)
    return sketchgp.accelerate(model).eval()


def tuned(x, y):
    """Hyperparameters by the marginal likelihood of some of the points, which is enough for them."""
    model = SingleTaskGP(x[:500], y[:500])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model.state_dict()


def report(what, x, new):
    """What the function is without noise at the last ``new`` points."""
    values = hartmann(x[-new:])
    print(
        f"{what}: values of {values.mean():.2f} on average and {values.max():.3f} at best, "
        f"of {hartmann.optimal_value:.3f} there is"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--points", type=int, default=5_000, help="evaluations to begin with (default: 5,000)")
    parser.add_argument("--rounds", type=int, default=4, help="steps of either kind (default: 4)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    x = torch.rand(arguments.points, 6, dtype=torch.float64)
    y = evaluate(x)
    hyperparameters = tuned(x, y)
    report(f"{len(x)} points at random", x, len(x))
    start = x, y

    # Thompson sampling: draw eight functions from the posterior and go to the maximum of each.
    for step in range(arguments.rounds):
        model = accelerated(x, y, hyperparameters)
        samples = sketchgp.sample_posterior(model, 8, seed=step)  # one solve, with eight columns
        paths = PosteriorPathModel(samples, (8,))
        candidates, _ = optimize_posterior_samples(paths, hartmann.bounds, raw_samples=512, num_restarts=4)
        x, y = torch.cat([x, candidates]), torch.cat([y, evaluate(candidates)])
        report(f"Thompson sampling, round {step + 1}, {len(candidates)} points", x, len(candidates))
    print(samples.report)

    # From the same start: expected improvement of two points together over what the model thinks is best of the data.
    x, y = start
    for step in range(arguments.rounds):
        model = accelerated(x, y, hyperparameters)
        best = y.topk(50, dim=0).indices.flatten()
        with torch.no_grad():
            best_mean = model.posterior(x[best]).mean.max()
        sampler = SobolQMCNormalSampler(torch.Size([64]), seed=step)
        acquisition = qLogExpectedImprovement(model, best_f=best_mean, sampler=sampler)
        candidates, _ = optimize_acqf(
            acquisition, hartmann.bounds, q=2, num_restarts=3, raw_samples=64, options={"maxiter": 50}
        )
        x, y = torch.cat([x, candidates]), torch.cat([y, evaluate(candidates)])
        report(f"expected improvement, round {step + 1}, {len(candidates)} points", x, len(candidates))


if __name__ == "__main__":
    main()
