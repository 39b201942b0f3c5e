"""Tune a model and predict with it, on one process or on many.

    python examples/sharded_training.py                              # one process
    torchrun --nproc-per-node=2 examples/sharded_training.py         # two of them, on any machine
    torchrun --nproc-per-node=8 examples/sharded_training.py         # eight GPUs of one machine
    torchrun --nproc-per-node=2 --max-restarts=3 examples/sharded_training.py --checkpoint fit.pt

Two lines are all that differs from a script for one process: the ``with`` and, where there are GPUs, the one that gives
each process its own.  ``--rows`` sets how many diamonds are trained on; it takes some seconds.  With ``--checkpoint``
the fit goes on where it was when a process dies and torchrun starts all of them again.
"""

import argparse
import os

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


def standardised_split(rows, test_rows=200):
    """``rows`` training and ``test_rows`` test diamonds, standardised, in float32: the same on every rank."""
    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: rows + test_rows]
    x, y = data.x[order], data.y[order].log()
    x = (x - x[:rows].mean(0)) / x[:rows].std(0)
    y = (y - y[:rows].mean()) / y[:rows].std()
    x, y = x.float(), y.float()
    return x[:rows], y[:rows], x[rows:], y[rows:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1500, help="training rows (default: 1500)")
    parser.add_argument("--iterations", type=int, default=5, help="steps of the optimiser (default: 5)")
    parser.add_argument("--checkpoint", help="a file that the fit is kept in (default: none)")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)

    with sketchgp.distributed.sharded() as shards:
        train_x, train_y, test_x, test_y = (part.to(device) for part in standardised_split(arguments.rows))
        model = PriceModel(train_x, train_y, gpytorch.likelihoods.GaussianLikelihood()).to(device)
        sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=200))

        # Every rank makes the same calls, and gets the whole result.
        history = sketchgp.fit(
            model, objective="probes", iterations=arguments.iterations, checkpoint=arguments.checkpoint
        )
        prediction = sketchgp.predict(model, test_x)
        error = (prediction.mean - test_y).square().mean().sqrt()

        # Only what computes nothing together may be left to one rank.
        if shards.rank == 0:
            print(f"{shards.count} process(es), {shards.bytes_sent / 2**20:.1f} MiB sent by each")
            print(f"loss per datum {history.losses[0]:.3f} -> {history.best_loss:.3f}")
            print(f"test RMSE {error:.3f} (standardised log price)")
            print(prediction.report)


if __name__ == "__main__":
    main()
