"""Fewer points than data: tune on 200 inducing points, predict with 1000, then fit the same from a stream of batches.

Run it with ``python examples/inducing_points.py``; it takes half a minute on two cores and reads the diamonds that come
with the package. ``--rows`` sets how many of them.
"""

import argparse

import gpytorch
import torch
from torch.utils.data import DataLoader, TensorDataset

import sketchgp
from sketchgp.datasets import load_diamonds


def standardised_split(rows, test_rows=1000):
    """``rows`` training and ``test_rows`` test diamonds: standardised features and log price, in float32."""
    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: rows + test_rows]
    x, y = data.x[order], data.y[order].log()
    x = (x - x[:rows].mean(0)) / x[:rows].std(0)
    y = (y - y[:rows].mean()) / y[:rows].std()
    x, y = x.float(), y.float()
    return x[:rows], y[:rows], x[rows:], y[rows:]


def rmse(mean, y):
    return float((mean - y).square().mean().sqrt())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=10_000, help="training rows (default: 10,000)")
    rows = parser.parse_args().rows
    train_x, train_y, test_x, test_y = standardised_split(rows)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    mean = gpytorch.means.ConstantMean()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=train_x.shape[1]))

    # Hyperparameters by the bound of Titsias, on few points.
    z = sketchgp.choose_inducing_points(kernel, train_x, 200).points
    small = sketchgp.InducingPointGP(train_x, train_y, likelihood, mean, kernel, inducing_points=z)
    history = sketchgp.fit(small, iterations=40, learning_rate=0.2)
    print(f"loss per datum {history.losses[0]:.3f} -> {history.best_loss:.3f} in {history.seconds[-1]:.1f} s")

    # The same kernel and noise with more points, which differ from each other by the kernel's measure.
    chosen = sketchgp.choose_inducing_points(kernel, train_x, 1000, method="rpcholesky")
    model = sketchgp.InducingPointGP(train_x, train_y, likelihood, mean, kernel, inducing_points=chosen.points)
    prediction = sketchgp.predict(model, test_x)
    inside = (prediction.mean - test_y).abs() <= 2 * prediction.observation_variance.sqrt()
    print(f"1000 points: RMSE {rmse(prediction.mean, test_y):.4f}, {float(inside.float().mean()):.0%} of the test rows "
          "within two deviations")  # fmt: skip
    print(prediction.report)

    # The same mean from a stream, for data that do not fit into memory.
    stream = DataLoader(TensorDataset(train_x, train_y - mean.constant.detach()), batch_size=500, shuffle=True)
    problem = sketchgp.InducingPointProblem(kernel, stream, None, likelihood.noise.item(), chosen.points)
    solution = sketchgp.EigenPro4(epochs=10).solve(problem)
    streamed = kernel(test_x, chosen.points).to_dense().detach().double() @ solution.value + mean.constant.detach()
    print(f"from a stream: RMSE {rmse(streamed, test_y):.4f}")
    print(solution.report)


if __name__ == "__main__":
    main()
