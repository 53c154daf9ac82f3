"""Linear maps between the parameters and the subspace in which the mechanism works: one map a file, one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from opacus_expm import _check
from opacus_expm.subspaces.base import Projection, Subspace
from opacus_expm.subspaces.sparse import Sparse
from opacus_expm.subspaces.stiefel import Stiefel
from opacus_expm.subspaces.structured import Structured

__all__ = [
    "Projection",
    "Sparse",
    "Stiefel",
    "Structured",
    "Subspace",
    "SubspaceName",
    "named",
    "read",
]

SubspaceName = Literal["sparse", "structured", "stiefel"]
_RECIPES: dict[str, type[Sparse | Structured | Stiefel]] = {
    "sparse": Sparse,
    "structured": Structured,
    "stiefel": Stiefel,
}


def named(projection: str | Subspace) -> Subspace:
    """A recipe by its name, with its own default settings; or the recipe itself.

    Raises:
        TypeError, ValueError: neither.
    """
    if isinstance(projection, str):
        return _RECIPES[_check.one_of("projection", projection, tuple(_RECIPES))]()
    if isinstance(projection, type) or not callable(getattr(projection, "build", None)):
        raise TypeError(
            f"projection must be one of {tuple(_RECIPES)}, or a subspace such as Sparse(seed=0), got {projection!r}"
        )
    return projection


def read(content: Any) -> Subspace:
    """A recipe from what its ``to_dict`` gave.

    Raises:
        ValueError: missing or unknown entries.
    """
    try:
        if not isinstance(content, Mapping):
            raise TypeError(f"a mapping is needed, got {type(content).__name__}")
        return _RECIPES[content["kind"]](**{name: value for name, value in content.items() if name != "kind"})
    except (KeyError, TypeError) as error:
        raise ValueError("this is no projection") from error
