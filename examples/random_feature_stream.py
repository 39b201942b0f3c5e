"""Learn digits from a stream without end, moved and noisy, save half way, and go on in another model.

Run it with ``python examples/random_feature_stream.py``; it takes some seconds and draws its digits itself.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import gpytorch
import torch

import sketchgp

STROKES = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]  # of seven segments
SEGMENTS = {  # row, column, height, width
    "a": (2, 4, 2, 7), "b": (3, 9, 6, 2), "c": (9, 9, 6, 2), "d": (14, 4, 2, 7), "e": (9, 4, 6, 2), "f": (3, 4, 6, 2),
    "g": (8, 4, 2, 7),
}  # fmt: skip


def images(count, seed):
    """``count`` noisy images of 16 x 16, each digit moved by up to two pixels, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    prototypes = torch.zeros(10, 20, 20)
    for digit, strokes in enumerate(STROKES):
        for stroke in strokes:
            row, column, height, width = SEGMENTS[stroke]
            prototypes[digit, row : row + height, column : column + width] = 1
    shifts = torch.randint(5, (count, 2), generator=generator)
    rows = (torch.arange(16) + shifts[:, :1]).unsqueeze(2)
    columns = (torch.arange(16) + shifts[:, 1:]).unsqueeze(1)
    moved = prototypes[labels.reshape(-1, 1, 1), rows, columns]
    return (moved + 0.4 * torch.randn(moved.shape, generator=generator)).flatten(1), labels


def stream(first=0, batch=1000):
    """Batches of images that never come again."""
    for number in itertools.count(first):
        yield images(batch, seed=number + 1)


def make(iterations):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = 10.0, 10.0
    solver = sketchgp.DoublyStochastic(num_features=2048, max_iterations=iterations)
    return sketchgp.RandomFeatureClassifier(kernel, classes=range(10), solver=solver)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=60, help="batches of 1,000 images (default: 60)")
    half = max(1, parser.parse_args().batches // 2)
    test_x, test_y = images(2000, seed=0)

    def wrong(model):
        return float((model.predict(test_x) != test_y).float().mean())

    model = make(half)
    print(model.learn(stream()))
    print(f"after {half} batches {wrong(model):.1%} of the test images are wrong")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half-way.pt"
        torch.save(model.state_dict(), path)
        print(f"saved in {path.stat().st_size / 1024:.0f} KiB; images seen take {half * 1000 * 1024 / 2**20:.0f} MiB")
        later = make(half)
        later.load_state_dict(torch.load(path, weights_only=True))
    later.learn(stream(first=half))
    print(f"after {2 * half} batches {wrong(later):.1%}")
    chances = later.probabilities(test_x[:3])
    print("the first three:", later.predict(test_x[:3]).tolist(), [f"{float(p):.2f}" for p in chances.amax(dim=1)])


if __name__ == "__main__":
    main()
