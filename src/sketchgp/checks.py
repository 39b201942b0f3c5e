"""Checks of arguments: one function a kind, each saying whose argument it is, what it expects and what it found.

A check returns the value as the library keeps it: a plain Python number for a numpy scalar or a tensor of one, so that
choices print, compare and pickle alike wherever their numbers come from.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import InputError

_LONGEST = 80  # characters of a value in a message
_SHAPES = {1: "(n,)", 2: "(n, d)"}


def settle(choices: Any, check: Callable[..., Any], *names: str, **options: Any) -> None:
    """Check fields of a frozen dataclass and keep what the check returns; for ``__post_init__``.

    :param check: one of this module's; :param options: its own.
    :raises InputError: where a field is refused.
    """
    for name in names:
        object.__setattr__(choices, name, check(type(choices).__name__, name, getattr(choices, name), **options))


def count(owner: str, name: str, value: Any, *, least: int = 1, most: int | None = None, optional: bool = False) -> Any:
    """Return an integer of at least ``least``: whatever ``operator.index`` takes, but no bool.

    :param optional: whether None is as good.
    """
    found = _integer(value)
    kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
    if most is not None:
        kind = f"{least} or {most}" if most == least + 1 else f"an integer from {least} to {most}"
    right = found is not None and least <= found and (most is None or found <= most)
    return _accept(owner, name, value, found, right, kind, optional)


def counts(owner: str, name: str, value: Any, *, least: int = 1) -> tuple[int, ...]:
    """Return a sequence of integers, each of at least ``least``, as a tuple."""
    return tuple(count(owner, name, one, least=least) for one in _sequence(owner, name, value, "integers"))


def seed(owner: str, name: str, value: Any) -> int:
    """Return an integer that seeds a ``torch.Generator``, from -2^63 to below 2^63."""
    found = _integer(value)
    right = found is not None and -(2**63) <= found < 2**63
    return int(_accept(owner, name, value, found, right, "an integer below 2^63", False))


def number(
    owner: str,
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = False,
    optional: bool = False,
) -> Any:
    """Return a real number, above ``above`` or at least ``least``, below ``below`` or at most ``most``; NaN is none.

    :param finite: whether infinity is refused; :param optional: whether None is as good.
    """
    found = _plain(value)
    real = isinstance(found, Real) and not isinstance(found, bool) and not math.isnan(found)
    right = (
        real
        and (above is None or found > above)
        and (least is None or found >= least)
        and (below is None or found < below)
        and (most is None or found <= most)
        and not (finite and math.isinf(found))
    )
    if above is not None and below is not None:
        kind = f"a number between {above:g} and {below:g}"
    elif least is not None and most is not None:
        kind = f"a number from {least:g} to {most:g}"
    elif above == 0:
        kind = "a positive number below infinity" if finite else "a positive number"
    elif least is not None:
        kind = f"a number of at least {least:g}"
    else:
        kind = "a finite number" if finite else "a number"
    plain = found if not right or isinstance(found, int | float) else float(found)
    return _accept(owner, name, value, plain, right, kind, optional)


def numbers(owner: str, name: str, value: Any, **options: Any) -> list[float]:
    """Return a sequence of at least one real number, as a list; :param options: of :func:`number`."""
    given = list(_sequence(owner, name, value, "numbers"))
    if not given:
        raise InputError(f"{owner}: {name} expects at least one, got none.")
    return [number(owner, f"{name}[{i}]", one, **options) for i, one in enumerate(given)]


def _sequence(owner: str, name: str, value: Any, kind: str) -> Any:
    right = isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0
    return _accept(owner, name, value, value, right, f"a sequence of {kind}", False)


def tolerance(owner: str, name: str, value: Any, *, words: tuple[str, ...] = (), optional: bool = False) -> Any:
    """Return a relative residual, a number between 0 and 1; or one of some words."""
    if isinstance(value, str) and words:
        if value not in words:
            kind = ", ".join(f"{one!r}" for one in words)
            raise refusal(owner, name, f"a number between 0 and 1, {kind}", value, optional)
        return value
    return number(owner, name, value, above=0, below=1, optional=optional)


def flag(owner: str, name: str, value: Any, *, optional: bool = False) -> Any:
    """Return True or False."""
    found = _plain(value)
    return _accept(owner, name, value, found, isinstance(found, bool), "True or False", optional)


def word(owner: str, name: str, value: Any, allowed: Sequence[str], *, optional: bool = False) -> Any:
    """Return one of some words."""
    words = [repr(one) for one in allowed]
    kind = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    right = isinstance(value, str) and value in allowed
    return _accept(owner, name, value, str(value) if right else value, right, kind, optional)


def path(owner: str, name: str, value: Any, *, optional: bool = False) -> Any:
    """Return a path in the file system."""
    right = isinstance(value, str | os.PathLike) and bool(os.fspath(value))
    return _accept(owner, name, value, value, right, "a path", optional)


def function(owner: str, name: str, value: Any) -> Any:
    """Return something to call, or None."""
    return _accept(owner, name, value, value, callable(value), "a function", optional=True)


def _accept(owner: str, name: str, value: Any, found: Any, right: bool, kind: str, optional: bool) -> Any:
    """Return what was found in a value where it is right, and None where that is as good."""
    if right or (value is None and optional):
        return found
    raise refusal(owner, name, kind, value, optional)


def instance(owner: str, name: str, value: Any, classes: Any, kind: str, hint: str = "") -> Any:
    """Return an object of some class.

    :param kind: the class in words; :param hint: what to do about another one.
    """
    if not isinstance(value, classes):
        raise refusal(owner, name, kind, value, hint=hint)
    return value


def tensor(owner: str, name: str, value: Any, dims: Sequence[int]) -> Tensor:
    """Return a finite, dense float32 or float64 tensor of at least one row, and of one column if it is of points.

    :param dims: the numbers of dimensions that are right.
    """
    shape = " or ".join(_SHAPES[d] for d in dims)
    if not torch.is_tensor(value):
        raise refusal(owner, name, f"a tensor of shape {shape}", value)
    _dense(owner, name, value)
    if value.dim() not in dims:
        raise InputError(f"{owner}: {name} expects shape {shape}, got {tuple(value.shape)}.")
    if value.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{owner}: {name} expects float32 or float64, got {value.dtype}.")
    for size, what in zip(value.shape, ("row",) if 1 in dims else ("row", "column"), strict=False):
        if size == 0:
            raise InputError(f"{owner}: {name} expects at least one {what}, got none: shape {tuple(value.shape)}.")
    if not bool(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value.reshape(value.shape[0], -1))).any(dim=1).nonzero()[0])
        raise InputError(f"{owner}: {name} holds NaN or infinity, first in row {bad}.")
    return value


def array(owner: str, name: str, value: Any, kind: str = "a tensor, a numpy array or a pandas table") -> Tensor:
    """Return a tensor of numbers: a tensor as it is, a copy of a numpy array or a pandas object.

    Missing values of a pandas object become NaN.

    :raises InputError: for anything else, for what holds no numbers, and for masked values, which an array would show.
    """
    if torch.is_tensor(value):
        return _dense(owner, name, value)
    given = unmasked(owner, name, value)
    if hasattr(value, "to_numpy"):  # pandas, polars
        given = value.to_numpy()
    if not hasattr(given, "__array__"):
        hint = f" Use {name}.toarray()." if hasattr(given, "toarray") else ""  # a sparse matrix of scipy
        raise refusal(owner, name, kind, value, hint=hint)
    values = np.asarray(given)
    try:
        if values.dtype.kind == "O":  # columns of several types, or with missing values
            missing = value.isna().to_numpy() if hasattr(value, "isna") else False
            values = np.where(missing, np.nan, values).astype(np.float64)
        if values.dtype.kind in "biufc":
            return copied(values)
    except (TypeError, ValueError):
        pass
    raise InputError(f"{owner}: {name} expects numbers, got {found(value)} of {values.dtype}.")


def _dense(owner: str, name: str, value: Tensor) -> Tensor:
    if value.layout != torch.strided:
        raise InputError(f"{owner}: {name} expects a dense tensor, got {value.layout}; use {name}.to_dense().")
    return value


def unmasked(owner: str, name: str, value: Any) -> Any:
    """Return the value, unless it is an array with masked entries: numpy converts those to the numbers under the mask.

    :raises InputError: for those.
    """
    if np.ma.is_masked(value):
        raise InputError(
            f"{owner}: {name} expects no masked values, got {int(np.ma.count_masked(value))} of them; leave those rows "
            f"out, or put numbers in their place: {name}.filled(...)."
        )
    return value


def copied(values: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of a numpy array as a contiguous tensor.

    Torch takes neither negative strides, nor bytes in the order of other machines, nor numbers wider than float64.
    """
    values = np.asarray(values)
    wide = {"f": np.float64, "c": np.complex128}.get(values.dtype.kind)
    native = np.dtype(wide) if wide and values.dtype.itemsize > np.dtype(wide).itemsize else values.dtype
    with np.errstate(over="ignore"):  # infinity is refused by those who ask for finite numbers
        return torch.from_numpy(np.array(values, dtype=native.newbyteorder("="), order="C")).to(device, dtype)


def points_like(owner: str, name: str, value: Any, points: Any) -> Tensor:
    """Return points ``(m, d)`` in the dtype and on the device of others ``(n, d)``; ``(m,)`` is as good where d is 1.

    :param value: as :func:`array` takes it.
    :raises InputError: for other shapes, no rows, complex numbers, NaN or infinity, also where it is the others' dtype
        that cannot hold a number.
    """
    if points.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"{owner}: the training inputs are {points.dtype}, where float32 or float64 is expected; convert the model "
            "and its data: model.float() or model.double()."
        )
    given = array(owner, name, value)
    if not given.is_complex() and not given.is_quantized:
        given = given.to(points.device, points.dtype)
    if given.dim() == 1 and points.shape[-1] == 1:
        given = given.unsqueeze(-1)
    given = tensor(owner, name, given, (2,))
    if given.shape[-1] != points.shape[-1]:
        raise InputError(
            f"{owner}: {name} expects shape (m, {points.shape[-1]}), as the training inputs; got {tuple(given.shape)}."
        )
    return given


def inputs(owner: str, name: str, value: Any, sets: bool = False) -> Tensor:
    """Return points ``(..., n, d)`` for a kernel: a dense floating-point tensor of at least one row and one column.

    :param sets: whether there are several sets of them, ``(S, ..., n, d)``.
    """
    shape = "(S, ..., n, d)" if sets else "(..., n, d)"
    if not torch.is_tensor(value):
        raise refusal(owner, name, f"a tensor of shape {shape}", value)
    if value.dim() < 2 + sets or 0 in value.shape or value.layout != torch.strided or not value.is_floating_point():
        raise InputError(
            f"{owner}: {name} expects a dense floating-point tensor of shape {shape}, at least one point and one "
            f"feature; got shape {tuple(value.shape)}, {value.dtype}, {value.layout}."
        )
    return value


def points_among(owner: str, x: Any, others: Any, sets: bool = False) -> Tensor:
    """Return finite :func:`inputs` like those that a model has seen; of one feature, the last dimension may lack."""
    if torch.is_tensor(x) and x.dim() == 1 + sets and others.shape[-1] == 1:
        x = x.unsqueeze(-1)
    same_points(owner, inputs(owner, "x", x, sets), others)
    if not bool(torch.isfinite(x).all()):
        first = (~torch.isfinite(x)).any(dim=-1).nonzero()[0].tolist()
        raise InputError(f"{owner}: x holds NaN or infinity, first in x{first}.")
    return x


def labels(owner: str, name: str, value: Any) -> Tensor:
    """Return a tensor of integers, at least one."""
    if not torch.is_tensor(value) or value.layout != torch.strided:
        raise refusal(owner, name, "a tensor of integers", value)
    if value.is_floating_point() or value.is_complex() or value.is_quantized:
        raise InputError(f"{owner}: {name} expects a tensor of integers, got {value.dtype}.")
    if not value.numel():
        raise InputError(f"{owner}: {name} expects at least one label, got none.")
    return value


def label_array(owner: str, name: str, value: Any) -> Any:
    """Return labels that are no tensor as a numpy array of at least one: integers, texts (as numpy's) or booleans."""
    kind = "integers, texts or booleans"
    unmasked(owner, name, value)
    try:
        values = np.asarray(value)
    except (TypeError, ValueError):
        raise refusal(owner, name, kind, value) from None
    if values.dtype.kind == "U" and not hasattr(value, "dtype"):  # a list, of which numpy makes texts if one is
        values = np.asarray(value, dtype=object)
    if values.dtype.kind in "OT":  # of pandas
        if not all(isinstance(label, str) for label in values.reshape(-1)):
            raise InputError(f"{owner}: {name} expects {kind}, all of one kind; got {found(value)} of objects.")
        values = values.astype(np.str_)
    if values.dtype.kind not in "biuU" or not values.ndim:
        raise refusal(owner, name, kind, value)
    if not values.size:
        raise InputError(f"{owner}: {name} expects at least one label, got none.")
    return values


def dtype(owner: str, name: str, value: Any) -> torch.dtype:
    """Return a floating-point type of torch."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise refusal(owner, name, "a floating-point torch.dtype", value)
    return value


def like(owner: str, name: str, value: Any, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a tensor as :func:`tensor` does, of the solution's shape and on its device."""
    tensor(owner, name, value, (len(shape),) if torch.is_tensor(value) and value.dim() == len(shape) else (1, 2))
    if tuple(value.shape) != tuple(shape):
        raise InputError(f"{owner}: {name} expects the solution's shape {tuple(shape)}, got {tuple(value.shape)}.")
    if value.device != device:
        raise InputError(f"{owner}: {name} expects a tensor on {device}, got one on {value.device}.")
    return value


def pair(owner: str, value: Any, points: Any, columns: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Return points ``(p, d)`` like ``points`` and their targets ``(p, *columns)``, as a pair; or None."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise refusal(owner, "held_out", "a pair of points and targets", value, optional=True)
    x = tensor(owner, "held_out points", value[0], (2,))
    y = tensor(owner, "held_out targets", value[1], (1, 2))
    same_points(owner, x, points, "held_out points", "the problem's points")
    if y.shape != (len(x), *columns):
        raise InputError(f"{owner}: held_out targets expect {(len(x), *columns)}, got {tuple(y.shape)}.")
    if y.device != x.device:
        raise InputError(f"{owner}: held_out targets expect to be on {x.device}, got them on {y.device}.")
    return x, y


def same_points(owner: str, x: Any, others: Any, name: str = "x", whose: str = "before") -> None:
    """:raises InputError: unless x ``(..., b, d)`` has the features, dtype and device of others.

    :param whose: these are, in words.
    """
    if x.shape[-1] != others.shape[-1] or x.dtype != others.dtype or x.device != others.device:
        raise InputError(
            f"{owner}: {name} expects {others.shape[-1]} features, {others.dtype} on {others.device}, as {whose}; got "
            f"{x.shape[-1]} features, {x.dtype} on {x.device}."
        )


def variances(owner: str, name: str, value: Any, x: Any, *, zero: bool = False) -> Tensor:
    """Return variances of the rows of x, ``(n,)`` float64, from a positive number or as many as there are rows.

    :param zero: whether 0 is as good.
    """
    n, kind = len(x), f"a number or a tensor of shape ({len(x)},)"
    try:
        given = torch.as_tensor(value) if hasattr(value, "dtype") else torch.as_tensor(value, dtype=torch.float64)
        if isinstance(value, bool) or given.dtype == torch.bool or given.is_complex() or given.layout != torch.strided:
            raise TypeError
        given = given.detach().to(x.device, torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise refusal(owner, name, kind, value) from None
    if given.dim() == 0 or given.shape == (1,):
        given = given.reshape(1).expand(n)
    if given.shape != (n,):
        raise refusal(owner, name, kind, value)
    if not bool(torch.isfinite(given).all()) or not bool(((given > 0) | (zero & (given == 0))).all()):
        raise InputError(
            f"{owner}: {name} expects positive, finite variances; the smallest given is {float(given.min())}."
        )
    return given


def refusal(owner: str, name: str, kind: str, value: Any, optional: bool = False, hint: str = "") -> InputError:
    """Return the error for an argument that is not what was expected, for the caller to raise."""
    return InputError(f"{owner}: {name} expects {kind}{', or None,' if optional else ','} got {found(value)}.{hint}")


def found(value: Any) -> str:
    """Describe an argument in a few words."""
    if torch.is_tensor(value) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {shape}"
    text = repr(value)
    if len(text) > _LONGEST or "\n" in text:
        return f"an object of class {type(value).__name__}"
    return text


def _plain(value: Any) -> Any:
    """Convert numpy's scalars, and arrays and tensors of no dimension, to Python's own."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _integer(value: Any) -> int | None:
    value = _plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
