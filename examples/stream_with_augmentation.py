"""Inducing points from a stream: images that are moved and noisy, other ones in every epoch, none of them kept.

Run it with ``python examples/stream_with_augmentation.py``; it takes some seconds and draws its digits itself.
"""

import argparse

import gpytorch

import sketchgp
from random_feature_stream import images  # beside this file: digits of seven segments


class Augmented:
    """Batches ``(x, y)``, others at each start: a stream may be any iterable, a ``DataLoader`` for one."""

    def __init__(self, classes, batches, batch=500):
        self.classes, self.batches, self.batch, self.epoch = classes, batches, batch, 0

    def __iter__(self):
        self.epoch += 1
        for number in range(self.batches):
            x, labels = images(self.batch, seed=1000 * self.epoch + number)
            yield x, self.classes.encode(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--points", type=int, default=1000, help="inducing points (default: 1,000)")
    parser.add_argument("--batches", type=int, default=10, help="batches of 500 images an epoch (default: 10)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs (default: 5)")
    arguments = parser.parse_args()

    points, labels = images(arguments.points, seed=0)
    test_x, test_labels = images(2000, seed=999)
    classes = sketchgp.OneHot(labels)
    kernel = gpytorch.kernels.RBFKernel()
    kernel.lengthscale = 10.0

    def wrong(weights):
        means = kernel(test_x, points).to_dense().detach().double() @ weights
        return float((classes.decode(means) != test_labels).float().mean())

    # The images that are inducing points, and nothing else: least squares, exactly.
    fixed = sketchgp.InducingPointProblem(kernel, points, classes.encode(labels), 0.1, points)
    print(f"{len(points)} images as they are: {wrong(sketchgp.QR().solve(fixed).value):.1%} of the test images wrong")

    # The same points, and a stream of images that never come again.
    stream = Augmented(classes, arguments.batches)
    problem = sketchgp.InducingPointProblem(kernel, stream, None, noise=0.1, inducing_points=points)
    solution = sketchgp.EigenPro4(epochs=arguments.epochs).solve(problem)
    seen = arguments.epochs * arguments.batches * stream.batch
    print(f"and {seen} more from a stream: {wrong(solution.value):.1%}")
    print(solution.report)


if __name__ == "__main__":
    main()
