"""Energies of molecules by the l1 Laplace kernel on sorted Coulomb matrices.

Run it with ``python examples/molecules.py``; it takes some seconds on one core and makes up its molecules: atoms at
random places, with an energy for each pair. ``--data qm7.npz`` reads real ones: arrays ``X`` ``(n, d)``, the entries of
Coulomb matrices, and ``y`` ``(n,)``, energies. ``--picture FILE`` draws.
"""

import argparse

import gpytorch
import numpy as np
import torch

import sketchgp


def made_up(count, atoms=6, seed=0):
    """Sorted Coulomb matrices of ``count`` molecules, ``(count, atoms (atoms + 1) / 2)``, and their energies."""
    generator = torch.Generator().manual_seed(seed)
    charges = torch.tensor([1.0, 6.0, 7.0, 8.0])[torch.randint(4, (count, atoms), generator=generator)]
    lattice = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(2))[:atoms].float()
    places = 1.5 * lattice + 0.15 * torch.randn(count, atoms, 3, generator=generator)
    distances = torch.cdist(places, places) + torch.eye(atoms)
    pairs = charges.unsqueeze(1) * charges.unsqueeze(2)
    bonds = pairs.sqrt() * ((1 - (1.5 - distances).exp()).square() - 1)  # a Morse potential for each pair
    energy = bonds.triu(1).sum(dim=(1, 2))
    coulomb = pairs / distances
    coulomb.diagonal(dim1=1, dim2=2).copy_(0.5 * charges**2.4)
    order = coulomb.square().sum(dim=2).argsort(dim=1, descending=True)  # rows by their norm, so that labels drop out
    coulomb = coulomb.gather(1, order.unsqueeze(2).expand_as(coulomb))
    coulomb = coulomb.gather(2, order.unsqueeze(1).expand_as(coulomb))
    rows, columns = torch.tril_indices(atoms, atoms)
    return coulomb[:, rows, columns], energy


class Energies(sketchgp.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(sketchgp.LaplaceKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=2000, help="training molecules (default: 2,000)")
    parser.add_argument("--data", help="an .npz file with X and y in place of molecules that are made up")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()
    rows = arguments.rows

    if arguments.data:
        with np.load(arguments.data) as arrays:
            x, y = torch.from_numpy(arrays["X"]), torch.from_numpy(arrays["y"])
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        x, y = x[order], y[order]
    else:
        x, y = made_up(rows + 500)
    x, y = x[: rows + 500].double(), y[: rows + 500].double()
    centre, spread = y[:rows].mean(), y[:rows].std()
    targets = (y[:rows] - centre) / spread

    # The entries of a Coulomb matrix have one unit, so they are not standardised one by one: one lengthscale, of the
    # size of a typical distance between two molecules. Energies have next to no noise.
    model = Energies(x[:rows], targets, gpytorch.likelihoods.GaussianLikelihood()).double()
    some = x[:200]
    model.covar_module.base_kernel.lengthscale = torch.cdist(some, some, p=1).median()
    model.likelihood.noise = 1e-3
    history = sketchgp.fit(model, iterations=15, start="model")
    print(f"{history}\nlengthscale {model.covar_module.base_kernel.lengthscale.item():.3g}")

    prediction = sketchgp.predict(model, x[rows:])
    mean = centre + spread * prediction.mean
    error = (mean - y[rows:]).abs()
    print(f"mean absolute error {error.mean():.3g}, of the mean energy {(y[rows:] - centre).abs().mean():.3g}")
    for share in (0.5, 0.1):  # what the model is least sure of is what it errs at most
        sure = prediction.variance <= prediction.variance.quantile(share)
        print(f"  of the {share:.0%} that it is surest of {error[sure].mean():.3g}")
    print(prediction.report)

    if arguments.picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(4.2, 3.6))
        points = axes.scatter(y[rows:], mean, c=(spread * prediction.variance.sqrt()), s=6)
        axes.plot([y.min(), y.max()], [y.min(), y.max()], color="black", linewidth=0.6)
        figure.colorbar(points, label="posterior deviation")
        axes.set(xlabel="energy", ylabel="predicted")
        figure.tight_layout()
        figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
