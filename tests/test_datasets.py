"""The bundled data: whole, in its units, and with its licence."""

from importlib import resources

import pytest
import torch

from sketchgp.datasets import load_diamonds


def test_diamonds_are_whole_and_in_their_units():
    data = load_diamonds()
    assert data.x.shape == (53_940, 9)
    assert data.y.shape == (53_940,)
    assert data.x.dtype == data.y.dtype == torch.float64
    assert data.feature_names == ("carat", "cut", "color", "clarity", "depth", "table", "x", "y", "z")
    assert (data.y.min(), data.y.max()) == (326.0, 18823.0)
    # The first row as ggplot2 prints it: 0.23, Ideal, E, SI2, 61.5, 55, 326 USD, 3.95, 3.98, 2.43.
    torch.testing.assert_close(data.x[0], torch.tensor([0.23, 4, 1, 1, 61.5, 55, 3.95, 3.98, 2.43]).double())
    assert data.y[0] == 326.0
    assert data.x[:, 0].sum().item() == pytest.approx(43040.87, abs=0.005)
    assert data.y.mean().item() == pytest.approx(3932.7997, abs=1e-4)


def test_diamonds_in_another_dtype():
    assert load_diamonds(torch.float32).x.dtype == torch.float32


def test_licence_travels_with_the_data():
    text = (resources.files("sketchgp") / "data" / "LICENSE-diamonds.txt").read_text(encoding="utf-8")
    assert "MIT License" in text
    assert "ggplot2" in text
    assert "Permission is hereby granted" in text
    assert "MIT" in load_diamonds().licence
