"""The methods of a comparison, the grids that are searched for those that have settings, and what a grid may hold."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from opacus_expm import _check
from opacus_expm.baselines import dp_sgd
from opacus_expm.experiments.journal import canonical

Settings = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]  # a name → the values to try; all combinations are tried

Method = Literal["zero-shot", "non-private", "dp-sgd", "expm", "expm-delta"]
LABELS = {
    "zero-shot": "zero-shot",
    "non-private": "non-private",
    "dp-sgd": "Opacus DP-SGD, (ε, δ)",
    "expm": "ExpM-Quad, (ε, 0), untuned",
    "expm-delta": "ExpM-Quad, (ε, δ), untuned",
}
METHODS = tuple(LABELS)
OURS = ("expm", "expm-delta")  # the engine's own call, which has nothing to tune

NON_PRIVATE_GRID: Grid = {"learning_rate": (1e-3, 3e-3, 1e-2), "batch_size": (256,), "epochs": (5, 20)}
# Five sizes of the largest step (learning rate × norm) under two clipping norms; many small batches, or all data at once.
DP_SGD_GRID: tuple[Grid, ...] = tuple(
    {"learning_rate": rates, "max_grad_norm": norm, "sample_rate": share, "epochs": epochs}
    for rates, norm in (((0.003, 0.01, 0.03, 0.1, 0.3), (1.0,)), ((0.03, 0.1, 0.3, 1.0, 3.0), (0.1,)))
    for share, epochs in (((0.05,), (10,)), ((1.0,), (20,)))
)
GRIDS: Mapping[str, Sequence[Grid]] = {"non-private": (NON_PRIVATE_GRID,), "dp-sgd": DP_SGD_GRID}
QUICK_GRIDS: Mapping[str, Sequence[Grid]] = {  # six candidates for DP-SGD
    "non-private": ({"learning_rate": (1e-2,), "batch_size": (256,), "epochs": (10,)},),
    "dp-sgd": tuple({**grid, "learning_rate": (0.003, 0.01, 0.03)} for grid in DP_SGD_GRID[:2]),
}

# What compare() passes on itself: a grid cannot hold it.
_TAKEN = {"model", "dataset", "criterion", "epsilon", "delta", "seed", "batch_size"}
# By method: the settings a grid may hold, and those it must.
_SETTINGS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "non-private": (frozenset(NON_PRIVATE_GRID), frozenset(NON_PRIVATE_GRID)),
    "dp-sgd": (
        (frozenset(inspect.signature(dp_sgd).parameters) | {"sample_rate"}) - _TAKEN,
        frozenset(DP_SGD_GRID[0]),
    ),
}


def budgets_of(method: str, budgets: Sequence[float]) -> Sequence[float | None]:
    """The budgets at which a method runs."""
    return (None,) if method in ("zero-shot", "non-private") else budgets


def combinations(grids: Sequence[Grid]) -> list[Settings]:
    """All combinations, in order, each once."""
    found: dict[str, Settings] = {}
    for grid in grids:
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            found.setdefault(canonical(settings), settings)
    return list(found.values())


def checked_grids(
    given: Mapping[str, Grid | Sequence[Grid]] | None, default: Mapping[str, Sequence[Grid]], methods: Sequence[str]
) -> dict[str, tuple[Grid, ...]]:
    """The grid of every method that has one."""
    for method in given or {}:
        if method in OURS:
            raise ValueError(
                f"grids[{method!r}] must be left out: ExpM-Quad runs with the budget alone, nothing to tune"
            )
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
        if not all(isinstance(value, int | float) for value in values):
            raise TypeError(f"grids[{method!r}][{name!r}] must hold numbers, got {values!r}")
        if name == "sample_rate" and not all(0 < value <= 1 for value in values):
            raise ValueError(f"grids[{method!r}]['sample_rate'] must hold numbers in (0, 1], got {values!r}")
