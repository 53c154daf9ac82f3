"""The methods of a comparison, the grids of settings that are searched for each, and what a grid may hold."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from opacus_expm import _check, subspaces
from opacus_expm.baselines import dp_sgd
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.experiments.journal import canonical
from opacus_expm.subspaces import Subspace

Settings = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]  # a name → the values to try; all combinations are tried

Method = Literal["zero-shot", "non-private", "dp-sgd", "expm", "expm-delta"]
LABELS = {
    "zero-shot": "zero-shot",
    "non-private": "non-private",
    "dp-sgd": "Opacus DP-SGD, (ε, δ)",
    "expm": "ExpM-Quad, (ε, 0)",
    "expm-delta": "ExpM-Quad, (ε, δ)",
}
METHODS = tuple(LABELS)

NON_PRIVATE_GRID: Grid = {"learning_rate": (1e-3, 3e-3, 1e-2), "batch_size": (256,), "epochs": (5, 20)}
# Five sizes of the largest step (learning rate × norm) under two clipping norms; many small batches, or all data at once.
DP_SGD_GRID: tuple[Grid, ...] = tuple(
    {"learning_rate": rates, "max_grad_norm": norm, "sample_rate": share, "epochs": epochs}
    for rates, norm in (((0.003, 0.01, 0.03, 0.1, 0.3), (1.0,)), ((0.03, 0.1, 0.3, 1.0, 3.0), (0.1,)))
    for share, epochs in (((0.05,), (10,)), ((1.0,), (20,)))
)
_NEWTON: Grid = {"projection": ("preconditioned",), "proj_dim": (None,), "damping": (1.0,)}
_RANDOM: Grid = {"projection": ("sparse",), "proj_dim": (50, 400), "radius": (0.01, 0.03, 0.1, 0.3, 1.0)}
EXPM_GRID: tuple[Grid, ...] = (
    {**_NEWTON, "radius": (0.03, 0.1, 0.3, 1.0, 3.0), "regularization": (0.0, None)},
    {**_RANDOM, "regularization": (0.0,)},
)
EXPM_DELTA_GRID: tuple[Grid, ...] = (
    {**_NEWTON, "damping": (None, 1.0), "radius": (1.0, 2.0, 4.0, 8.0), "rounds": (4, 8)},
    {**_RANDOM, "proj_dim": (400,), "radius": (0.3, 1.0), "rounds": (4, 8)},
)
GRIDS: Mapping[str, Sequence[Grid]] = {
    "non-private": (NON_PRIVATE_GRID,),
    "dp-sgd": DP_SGD_GRID,
    "expm": EXPM_GRID,
    "expm-delta": EXPM_DELTA_GRID,
}
QUICK_GRIDS: Mapping[str, Sequence[Grid]] = {  # six candidates for each private method
    "non-private": ({"learning_rate": (1e-2,), "batch_size": (256,), "epochs": (10,)},),
    "dp-sgd": tuple({**grid, "learning_rate": (0.003, 0.01, 0.03)} for grid in DP_SGD_GRID[:2]),
    "expm": (
        {**_NEWTON, "radius": (0.03, 0.1, 0.3), "regularization": (0.0,)},
        {**_RANDOM, "proj_dim": (400,), "radius": (0.1, 0.3, 1.0), "regularization": (None,)},
    ),
    "expm-delta": (
        {**_NEWTON, "radius": (1.0, 2.0, 4.0), "rounds": (8,)},
        {**_NEWTON, "radius": (1.0,), "rounds": (4,)},
        {**_NEWTON, "damping": (None,), "radius": (3.0, 6.0), "rounds": (8,)},
    ),
}


# Settings of the subspace, which the engine takes as an object; a grid names them one by one.
_SUBSPACE = frozenset({"damping", "rank", "temperature", "denoise"})
_PASS = frozenset(inspect.signature(ExpMQuadEngine.gather).parameters) | _SUBSPACE
DRAW_SETTINGS = frozenset(inspect.signature(ExpMQuadEngine.release).parameters)
# What compare() passes on itself, or what has no part in a comparison at one budget: a grid cannot hold it.
_TAKEN = {
    *("self", "model", "loader", "dataset", "criterion", "epsilon", "delta", "seed", "batch_size", "public_loader"),
    *("progress", "nominal_size", "views"),
}
_OURS = (frozenset(inspect.signature(ExpMQuadEngine.make_private_expm).parameters) | _SUBSPACE) - _TAKEN
# By method: the settings a grid may hold, and those it must.
_SETTINGS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "non-private": (frozenset(NON_PRIVATE_GRID), frozenset(NON_PRIVATE_GRID)),
    "dp-sgd": (
        (frozenset(inspect.signature(dp_sgd).parameters) | {"sample_rate"}) - _TAKEN,
        frozenset(DP_SGD_GRID[0]),
    ),
    "expm": (_OURS, frozenset({"radius", "proj_dim"})),
    "expm-delta": (_OURS, frozenset({"radius", "proj_dim"})),
}


def budgets_of(method: str, budgets: Sequence[float]) -> Sequence[float | None]:
    """The budgets at which a method runs."""
    return (None,) if method in ("zero-shot", "non-private") else budgets


def combinations(grids: Sequence[Grid], parameters: int) -> list[Settings]:
    """All combinations, in order, each once; a subspace as large as the model is the full space."""
    found: dict[str, Settings] = {}
    for grid in grids:
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            if settings.get("proj_dim") is not None and settings["proj_dim"] >= parameters:
                settings["proj_dim"] = None
            found.setdefault(canonical(settings), settings)
    return list(found.values())


def gathering(settings: Settings) -> Settings:
    """The settings that the pass depends on."""
    return {name: value for name, value in settings.items() if name in _PASS}


def subspace(settings: Settings) -> Subspace:
    """The recipe that the settings describe."""
    own = {name: settings[name] for name in _SUBSPACE if name in settings}
    recipe: Any = subspaces.named(settings.get("projection", "sparse"))
    return cast(Subspace, dataclasses.replace(recipe, **own))


def arguments(settings: Settings, recipe: Subspace) -> Settings:
    """The settings as the engine takes them, with a recipe that may have learned from public data."""
    return {name: value for name, value in settings.items() if name not in _SUBSPACE} | {"projection": recipe}


def checked_grids(
    given: Mapping[str, Grid | Sequence[Grid]] | None, default: Mapping[str, Sequence[Grid]], methods: Sequence[str]
) -> dict[str, tuple[Grid, ...]]:
    """The grid of every method that has one."""
    for method in given or {}:
        _check.one_of("grids: a method", method, tuple(default))
    found = {}
    for method in methods:
        if method not in default:
            continue
        own = (given or {}).get(method, default[method])
        found[method] = (own,) if isinstance(own, Mapping) else tuple(own)
        for grid in found[method]:
            check_grid(method, grid)
        if not found[method]:
            raise ValueError(f"grids[{method!r}] must hold at least one grid")
    return found


def check_grid(method: str, grid: object) -> None:
    """A mapping from the method's settings to values to try."""
    allowed, needed = _SETTINGS[method]
    if not isinstance(grid, Mapping):
        raise TypeError(f"grids[{method!r}] must be a mapping from settings to values, got {type(grid).__name__}")
    for name in grid:
        _check.one_of(f"grids[{method!r}]: a setting", name, sorted(allowed))
    if missing := sorted(needed - set(grid)):
        raise ValueError(f"grids[{method!r}] must name values for {', '.join(missing)}")
    for name, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"grids[{method!r}][{name!r}] must be a list of values, got {values!r}")
        if not all(value is None or isinstance(value, bool | int | float | str) for value in values):
            raise TypeError(f"grids[{method!r}][{name!r}] must hold numbers, names or None, got {values!r}")
        if name == "sample_rate" and not all(0 < _number(value) <= 1 for value in values):
            raise ValueError(f"grids[{method!r}]['sample_rate'] must hold numbers in (0, 1], got {values!r}")


def _number(value: object) -> float:
    """The value as a number, or NaN if it is none."""
    return float(value) if isinstance(value, int | float) else math.nan
