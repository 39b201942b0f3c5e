"""Tune on all the data: from subsets to all rows, with a bracket for the loss at the end, and a picture of the course.

Run it with ``python examples/tune_on_all_rows.py``; it takes a minute on one core and reads the diamonds that come with
the package. ``--rows`` sets how many of them, ``--picture FILE`` draws.
"""

import argparse

import gpytorch
import torch

import sketchgp
from sketchgp.datasets import load_diamonds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=6000, help="training rows (default: 6,000)")
    parser.add_argument("--iterations", type=int, default=15, help="the most steps on all rows (default: 15)")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()

    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: arguments.rows]
    x, y = data.x[order], data.y[order].log()
    x, y = ((x - x.mean(0)) / x.std(0)).float(), ((y - y.mean()) / y.std()).float()

    # Carat, the four qualities and the size along x: GPyTorch's kernels as they are, in a base class of sketchgp's.
    class Model(sketchgp.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=x.shape[-1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model(x[:, [0, 1, 2, 3, 6]], y, gpytorch.likelihoods.GaussianLikelihood())
    history = sketchgp.fit(model, iterations=arguments.iterations, checkpoint="fit.pt")  # the same call goes on from it
    print(history)
    if history.subset is not None:
        print(f"most of the way on a subset: {history.subset}")
    if history.bracket is not None:
        print(f"the exact loss per row is certainly between {history.bracket[0]:.5f} and {history.bracket[1]:.5f}")
    print("lengthscales", [round(value, 2) for value in model.covar_module.base_kernel.lengthscale[0].tolist()])
    print(f"noise {model.likelihood.noise.item():.4f}")
    if arguments.picture:
        history.plot().figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
