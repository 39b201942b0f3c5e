"""Classes with probabilities: how well diamonds are cut, from their measures alone, and whether the chances are right.

Run it with ``python examples/classification.py``; it takes some seconds and reads the diamonds that come with the
package. ``--rows`` sets how many of them, ``--picture FILE`` draws.
"""

import argparse

import gpytorch
import torch

import sketchgp
from sketchgp.datasets import load_diamonds

MEASURES = ("depth", "table", "x", "y", "z")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=20_000, help="training rows (default: 20,000)")
    parser.add_argument("--features", type=int, help="random features (default: by the number of rows)")
    parser.add_argument("--picture", help="a file to draw into")
    arguments = parser.parse_args()
    rows = arguments.rows

    data = load_diamonds()
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: rows + 2000]
    x = data.x[order][:, [data.feature_names.index(name) for name in MEASURES]]
    x = ((x - x[:rows].mean(0)) / x[:rows].std(0)).clamp(-5, 5).float()  # some sizes are typing errors
    labels = data.x[order, data.feature_names.index("cut")].long()
    train_x, test_x, train_labels, test_labels = x[:rows], x[rows:], labels[:rows], labels[rows:]
    common = train_labels.mode().values
    print(f"always the most common cut: {float((test_labels != common).float().mean()):.1%} wrong")

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
    kernel.outputscale, kernel.base_kernel.lengthscale = 10.0, 1.0

    # Logistic losses on random features: probabilities.
    solver = sketchgp.DoublyStochastic(num_features=arguments.features)
    classifier = sketchgp.RandomFeatureClassifier(kernel, classes=range(int(labels.max()) + 1), solver=solver)
    print(classifier.learn(train_x, train_labels))
    chances = classifier.probabilities(test_x)
    print(f"random features: {float((classifier.predict(test_x) != test_labels).float().mean()):.1%} wrong")

    # Are the chances right? Of the rows that were given some 70%, some 70% should be so.
    sure, hit = chances.max(dim=1).values, classifier.predict(test_x) == test_labels
    bins = torch.linspace(0.3, 1.0, 8)
    course = []
    for low, high in zip(bins, bins[1:], strict=False):
        inside = (sure >= low) & (sure < high)
        if inside.sum() >= 20:
            course.append((float(sure[inside].mean()), float(hit[inside].float().mean())))
            print(f"  said {course[-1][0]:.0%}, was so in {course[-1][1]:.0%} of {int(inside.sum())} rows")

    # Least squares on inducing points: labels without probabilities, in less time.
    classes = sketchgp.OneHot(train_labels)
    points = sketchgp.choose_inducing_points(kernel, train_x, 300).points
    likelihood, mean = gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.ZeroMean()
    model = sketchgp.InducingPointGP(train_x, classes.encode(train_labels), likelihood, mean, kernel, points)
    with torch.no_grad():
        predicted = classes.decode(model.eval()(test_x).mean)
    print(f"300 inducing points: {float((predicted != test_labels).float().mean()):.1%} wrong")

    if arguments.picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(4, 3.6))
        axes.plot([0.3, 1], [0.3, 1], color="black", linewidth=0.8)
        axes.plot(*zip(*course, strict=True), marker="o")
        axes.set(xlabel="probability that was given", ylabel="share of the rows where it was so")
        figure.tight_layout()
        figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
