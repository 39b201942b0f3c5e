"""Land surface temperatures on a map, seen where no cloud is: the mean everywhere, and how uncertain it is.

Run it with ``python examples/spatial_map.py``; it takes a minute on one core. The temperatures, beside this script, are
NASA's (``LICENSE-modis.txt``). ``--data FILE`` reads others: arrays ``X`` ``(n, 2)``, places on a grid, ``y`` ``(n,)``,
and ``is_test``, 1 for the places that are to be predicted. ``--picture FILE`` draws the maps.
"""

import argparse
from pathlib import Path

import gpytorch
import numpy as np
import torch

import sketchgp


class Field(sketchgp.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(2)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=0.5, ard_num_dims=2))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    here = Path(__file__).parent / "modis_temperatures.npz"
    parser.add_argument("--data", default=here, help="an .npz file with X, y and is_test (default: 9,000 temperatures)")
    parser.add_argument("--every", type=int, default=1, help="take every so-many-th place in either direction")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()

    with np.load(arguments.data) as arrays:
        places, values = torch.from_numpy(arrays["X"]), torch.from_numpy(arrays["y"])
        hidden = torch.from_numpy(arrays["is_test"]).bool()
    columns, rows = (np.unique(places[:, k].numpy(), return_inverse=True)[1] for k in (0, 1))
    kept = torch.from_numpy((columns % arguments.every == 0) & (rows % arguments.every == 0))
    places, values, hidden = places[kept], values[kept], hidden[kept]
    x = ((places - places.mean(0)) / places.std(0)).double()
    centre, spread = values[~hidden].mean(), values[~hidden].std()
    y = ((values - centre) / spread).double()
    print(f"{len(x)} places, {int(hidden.sum())} of them hidden")

    least = gpytorch.constraints.GreaterThan(1e-6)  # temperatures have hardly any noise
    model = Field(x[~hidden], y[~hidden], gpytorch.likelihoods.GaussianLikelihood(noise_constraint=least)).double()
    sketchgp.accelerate(model)
    print(sketchgp.fit(model))
    prediction = sketchgp.predict(model, x, variance="low_rank")
    mean, deviation = centre + spread * prediction.mean, spread * prediction.observation_variance.sqrt()
    error = (mean - values)[hidden]
    inside = (error.abs() < 1.96 * deviation[hidden]).double().mean()
    print(f"hidden places: RMSE {error.square().mean().sqrt():.2f}, {inside:.0%} inside the 95% band")
    print(prediction.report)

    if arguments.picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), sharey=True)
        seen = torch.where(hidden, torch.nan, values)
        for axis, (title, shown) in zip(
            axes, {"seen": seen, "posterior mean": mean, "deviation": deviation}.items(), strict=True
        ):
            drawn = axis.scatter(
                places[:, 0], places[:, 1], c=shown.detach(), s=60_000 / len(x), marker="s", linewidths=0
            )
            figure.colorbar(drawn, ax=axis, location="bottom")
            axis.set(title=title)
        figure.tight_layout()
        figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
