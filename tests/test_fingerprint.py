"""Keys of content: every entry counts, its place too, and nothing but the content does."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch

from sketchgp.fingerprint import data_key, module_key, module_mark, tensor_key

BIG = torch.randn(200_003, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def changes() -> dict[str, torch.Tensor]:
    """Tensors that differ from BIG in little."""
    last, signs, swapped, cancelled = (BIG.clone() for _ in range(4))
    last[-1, -1] = torch.nextafter(last[-1, -1], last[-1, -1] + 1)
    signs[5, 0], signs[70_000, 2] = -signs[5, 0], -signs[70_000, 2]
    swapped[[3, 150_000]] = swapped[[150_000, 3]]
    # hardly seen by sums over rows with smooth weights
    cancelled[10, 1] += 1e-9
    cancelled[11, 1] -= 1e-9
    return {"last": last, "signs": signs, "swapped": swapped, "cancelled": cancelled, "shape": BIG.reshape(3, -1)}


def test_every_entry_counts() -> None:
    keys = {name: tensor_key(tensor) for name, tensor in changes().items()}
    assert len({tensor_key(BIG), *keys.values()}) == 1 + len(keys)


def test_equal_contents_have_equal_keys() -> None:
    odd = torch.zeros(1001, dtype=torch.float32)
    assert tensor_key(BIG) == tensor_key(BIG.clone()) == tensor_key(BIG.mT.contiguous().mT)
    assert tensor_key(odd[1:]) == tensor_key(odd[:-1].clone())  # begins where no number of 8 bytes does
    odd[1] = 1e-30
    assert tensor_key(odd[1:]) != tensor_key(odd[:-1].clone())


def test_repeated_tensors_differ_by_their_shape() -> None:
    row = BIG[:1]
    assert tensor_key(row.expand(4, 3)) != tensor_key(row.expand(5, 3))
    one = torch.ones(1)
    assert tensor_key(one.expand(7)) == tensor_key(torch.ones(1).expand(7)) != tensor_key((2 * one).expand(7))
    assert tensor_key(torch.ones(7).as_strided((1,), (0,))) == tensor_key(one)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@pytest.mark.parametrize("known_by", [module_key, module_mark])
def test_settings_of_modules_count(known_by) -> None:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
    before = known_by(kernel)
    kernel.eval()
    assert known_by(kernel) == before == known_by(copy.deepcopy(kernel))
    kernel.base_kernel.nu = 2.5
    assert known_by(kernel) != before
    kernel.base_kernel.nu = 1.5
    assert known_by(kernel) == before
    keys = set()
    for kernel.transform in (torch.exp, torch.sigmoid, torch.nn.functional.softplus, _square):
        keys.add(known_by(kernel))
    assert len(keys) == 4
    del kernel.transform
    assert known_by(kernel) == before
    kernel.outputscale = 2.0
    assert known_by(kernel) != before
    other = [2 * parameter for parameter in kernel.parameters()]
    assert known_by(kernel, other) != known_by(kernel) == known_by(kernel, kernel.parameters())


def test_small_data_are_looked_at_as_a_whole() -> None:
    data = BIG[:1000].clone()
    before = data_key(data)
    assert data_key(data.clone()) == before
    data.data[7, 1] += 1e-9
    assert data_key(data) != before


def test_large_data_are_known_by_object_counter_and_rows() -> None:
    data = BIG.clone()
    before = data_key(data)
    assert data_key(data) == before != data_key(data.clone())
    data.numpy()[:] *= 1 + 1e-9
    assert data_key(data) != before
    before = data_key(data)
    data[7, 1] += 1e-9
    assert data_key(data) != before
