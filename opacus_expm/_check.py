"""One-line validators: each names the argument, what came and what is required."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real


def _real(name: str, value: object, requirement: str) -> float:
    """A finite real number, as float; booleans are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {requirement}, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be {requirement}, got {value!r}")
    return number


def positive(name: str, value: object) -> float:
    """A finite real number greater than zero."""
    number = _real(name, value, "a number greater than 0")
    if number <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}")
    return number


def non_negative(name: str, value: object) -> float:
    """A finite real number that is zero or more."""
    number = _real(name, value, "a number, 0 or greater")
    if number < 0:
        raise ValueError(f"{name} must be 0 or greater, got {value!r}")
    return number


def fraction(name: str, value: object) -> float:
    """A real number in [0, 1)."""
    number = _real(name, value, "a number in [0, 1)")
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    return number


def positive_int(name: str, value: object) -> int:
    """An integer greater than zero."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a positive integer, got {value!r} of type {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def seed(name: str, value: object) -> int:
    """A non-negative integer, where None would be drawn."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"{name} must be a non-negative integer or None, got {value!r}")
    return int(value)


def one_of(name: str, value: object, options: Collection[str]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def left_out(**arguments: object) -> None:
    """Nothing was given that has no meaning without a radius."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(
            f"{given[0]} has no meaning without radius=: learned rounds find it by themselves; leave it out, or pass radius="
        )
