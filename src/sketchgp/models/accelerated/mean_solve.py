"""A context variable that has a value inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


@contextmanager
def held(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Give a context variable a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
