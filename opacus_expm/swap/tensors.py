"""Which tensors are those of a batch, and whether they are as they were given."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a batch, of the arguments of a call, or of its result."""
    plain = dict(tree) if isinstance(tree, Mapping) else tree
    return [t for t in pytree.tree_leaves(plain) if isinstance(t, Tensor)]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def with_versions(tree: Any) -> list[tuple[Tensor, int]]:
    """The tensors, each with the number of changes in place that it has seen so far."""
    return [(t, version_of(t)) for t in tensors_of(tree)]


def changed_since(held: list[tuple[Tensor, int]]) -> bool:
    """Whether a tensor was changed in place after ``with_versions`` looked at it."""
    return any(version_of(t) != version for t, version in held)


def same_records(found: Tensor, given: Tensor) -> bool:
    """Whether two tensors have the same records in the same order.

    A record is a row. Device, type and the shape of a row may differ, values may not; NaN agrees with NaN.
    """
    if found is given:
        return True
    if found.shape[:1] != given.shape[:1] or found.numel() != given.numel():
        return False
    found = found.detach()
    same = given.detach().to(found.device, found.dtype).reshape(found.shape)
    return bool(((found == same) | ((found != found) & (same != same))).all())


def fingerprint(module: nn.Module, *, buffers: bool = True) -> list[Any]:
    """Differs after parameters (and buffers) were replaced, moved, frozen or changed in place; holds no values."""
    named = itertools.chain(module.named_parameters(), module.named_buffers() if buffers else ())
    return [(n, t.shape, t.device, t.dtype, t.requires_grad, t.data_ptr(), version_of(t)) for n, t in named]
