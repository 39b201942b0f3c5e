"""Take a GPyTorch model as it is, accelerate it, tune it, predict, and look at what the solves did.

Run it with ``python examples/accelerate_existing_model.py``; it takes some seconds on two cores and reads the
diamonds that come with the package. ``--rows`` sets how many of them.
"""

import argparse

import gpytorch
import torch

import sketchgp
from sketchgp.datasets import load_diamonds


class PriceModel(gpytorch.models.ExactGP):
    """An ordinary exact GP: constant mean, Matern-5/2 kernel with a lengthscale for each feature."""

    def __init__(self, train_x, train_y, likelihood):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=train_x.shape[-1])
        )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def standardised_split(rows, test_rows=500):
    """``rows`` training and ``test_rows`` test diamonds: standardised features and log price, in float32."""
    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: rows + test_rows]
    x, y = data.x[order], data.y[order].log()
    x = (x - x[:rows].mean(0)) / x[:rows].std(0)
    y = (y - y[:rows].mean()) / y[:rows].std()
    x, y = x.float(), y.float()
    return x[:rows], y[:rows], x[rows:], y[rows:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1500, help="training rows (default: 1500)")
    parser.add_argument("--iterations", type=int, default=40, help="steps of the optimiser (default: 40)")
    arguments = parser.parse_args()

    train_x, train_y, test_x, test_y = standardised_split(arguments.rows)
    model = PriceModel(train_x, train_y, gpytorch.likelihoods.GaussianLikelihood())

    # The one line that changes how the model is solved. sketchgp.restore(model) would undo it.
    sketchgp.accelerate(model)

    # Hyperparameters by marginal likelihood: the same probes at every step, so the curve is smooth.
    history = sketchgp.fit(model, iterations=arguments.iterations)
    print(f"loss per datum {history.losses[0]:.3f} -> {history.best_loss:.3f} in {history.seconds[-1]:.1f} s")

    # Mean and variance in batches. Every linear solve inside the block leaves a report.
    with sketchgp.record_solves() as solves:
        prediction = sketchgp.predict(model, test_x)
    for report in solves:
        print(report)

    error = (prediction.mean - test_y).square().mean().sqrt()
    inside = (prediction.mean - test_y).abs() < 1.96 * prediction.observation_variance.sqrt()
    print(f"test RMSE {error:.3f} (standardised log price); {inside.float().mean():.0%} inside the 95% band")

    # It is still a GPyTorch model: its own call, its own state_dict.
    with torch.no_grad():
        again = model(test_x[:5]).mean
    print("first five means", [round(value, 3) for value in again.tolist()])
    print("state_dict keys", sorted(model.state_dict())[:3], "...")


if __name__ == "__main__":
    main()
