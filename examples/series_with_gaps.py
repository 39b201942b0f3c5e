"""An hourly series with days, a trend and gaps of weeks: what it was meanwhile, and how sure that is.

Run it with ``python examples/series_with_gaps.py``; it takes half a minute on one core.  Hours on a regular grid are
multiplied by fast Fourier transforms, gaps or not.  ``--hours N`` takes a longer or shorter series, ``--picture FILE``
draws it.
"""

import argparse
import math

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, ScaleKernel

import sketchgp

DAY = 24.0


class Series(sketchgp.ExactGP):
    """Days whose shape changes slowly, weather of some days, and a trend."""

    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(1)
        days = PeriodicKernel() * MaternKernel(nu=1.5)
        days.kernels[0].period_length, days.kernels[0].lengthscale, days.kernels[1].lengthscale = DAY, 1.0, 60 * DAY
        days.kernels[0].raw_period_length.requires_grad_(False)  # a day is a day
        weather = MaternKernel(nu=0.5)
        weather.lengthscale = 3 * DAY
        self.covar_module = ScaleKernel(days) + ScaleKernel(weather)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def measured(hours):
    """Return hours and temperatures of a made-up station."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(hours, dtype=torch.float64)
    steps = torch.randn(hours, generator=generator, dtype=torch.float64)
    weather = torch.zeros(hours, dtype=torch.float64)
    keep = math.exp(-1 / (3 * DAY))
    for hour in range(1, hours):
        weather[hour] = keep * weather[hour - 1] + math.sqrt(1 - keep**2) * 3 * steps[hour]
    days = 4 * torch.sin(2 * math.pi * t / DAY) + torch.cos(4 * math.pi * t / DAY)
    noise = 0.3 * torch.randn(hours, generator=generator, dtype=torch.float64)
    return t, 10 + 0.5 * t / (30 * DAY) + days + weather, noise


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hours", type=int, default=8760, help="length of the series (a year)")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()

    t, truth, noise = measured(arguments.hours)
    missing = torch.rand(len(t), generator=torch.Generator().manual_seed(1)) < 0.1
    for start in (0.3, 0.7):  # two gaps, each a fortieth of the series
        missing[int(start * len(t)) : int((start + 0.025) * len(t))] = True
    x, y = t[~missing].unsqueeze(1), (truth + noise)[~missing]
    print(f"{len(t):,} hours, {int(missing.sum()):,} of them missing")

    model = sketchgp.accelerate(Series(x, y, gpytorch.likelihoods.GaussianLikelihood()).double())
    print(sketchgp.fit(model))
    prediction = sketchgp.predict(model, t.unsqueeze(1), variance="low_rank")
    deviation = prediction.observation_variance.sqrt()
    error = (prediction.mean - truth - noise)[missing]
    inside = (error.abs() < 1.96 * deviation[missing]).double().mean()
    slope = 30 * DAY * model.mean_module.weights.item()
    print(f"missing hours: RMSE {error.square().mean().sqrt():.2f}, {inside:.0%} inside the 95% band")
    print(f"trend: {slope:.2f} a month, of 0.50")
    print(prediction.report)

    if arguments.picture:
        import matplotlib.pyplot as plt

        gap = slice(max(0, int(0.28 * len(t))), int(0.35 * len(t)))
        figure, axes = plt.subplots(2, 1, figsize=(10, 5.5))
        for axis, part in zip(axes, (slice(None), gap), strict=True):
            days = t[part] / DAY
            mean, band = prediction.mean[part].detach(), 1.96 * deviation[part].detach()
            axis.fill_between(days, mean - band, mean + band, alpha=0.3, label="95% band")
            axis.plot(days, mean, linewidth=0.8, label="posterior mean")
            seen = torch.where(missing, torch.nan, truth + noise)[part]
            axis.plot(days, seen, ".", color="black", markersize=1.5, label="measured")
            axis.set(xlabel="day", ylabel="temperature, °C")
        axes[1].plot(t[gap] / DAY, truth[gap], color="tab:red", linewidth=0.8, label="truth")
        axes[1].legend(loc="upper right", ncols=4)
        axes[1].margins(y=0.2)
        figure.tight_layout()
        figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
