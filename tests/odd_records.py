"""A regression with three inputs, and records of every odd kind that may be added to it; no tests here."""

import math

import torch

ODD = {
    "plain": (1.0, 0.5),
    "far": (30.0, -1e4),
    "huge": (1e160, 1e160),
    "inf": (math.inf, 1.0),
    "nan": (1.0, math.nan),
    "zero": (0.0, 0.0),
}


def tensors(records):
    x = torch.randn(records, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 2


def neighbours(name):
    """Six records, and the same ones with an odd one."""
    x, y = tensors(6)
    a, b = ODD[name]
    more = torch.full((1, 3), a, dtype=torch.float64), torch.full((1, 1), b, dtype=torch.float64)
    return (x, y), (torch.cat([x, more[0]]), torch.cat([y, more[1]]))
