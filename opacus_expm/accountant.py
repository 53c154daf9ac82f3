"""The ledger: what was released, and what it cost.

A ``Release`` is an immutable record of public facts; ``ExpMAccountant`` keeps the list and turns it into ε(δ). It is
registered with Opacus as ``"expm"`` and goes on accepting DP-SGD steps, so that both kinds of training on the same
data share one total.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload

from opacus.accountants import IAccountant, register_accountant
from opacus.accountants.registry import _ACCOUNTANTS

from opacus_expm import _check, curves
from opacus_expm.composition import Event, Filter, Steps, total_epsilon
from opacus_expm.ledger import LedgerError, LedgerFile
from opacus_expm.sums import ADJACENCIES, BOUNDS, CLIPPINGS

NOISES = ("system", "given")
EXACT_SAMPLERS = ("exact", "secure")


class BudgetExceeded(ValueError):
    """An event would exceed the declared budget; nothing was charged or released."""


class NoGuarantee(ValueError):
    """The ledger holds, or would hold, a draw that ε does not cover: none can be stated, and no budget be kept.

    Its bounds were read off the private data, or its sampler was not exact; or, where there is a budget, its noise came from
    a generator that was given.
    """


class NotGuaranteed(UserWarning):
    """The ε that is stated holds only if the noise of every draw is unknown, and a generator was given for some of them."""


@dataclass(frozen=True)
class Release:
    """One draw that left, or was about to leave: public facts only.

    Attributes:
        epsilon_range: length of the interval that contains the privacy loss: the release is ε_range-DP.
        mu: parameter of Gaussian differential privacy, possibly infinite.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        epsilon: budget that was asked for, for all rounds of the plan together.
        delta: likewise.
        calibration: which calibration was used.
        radius: R.
        regularization: λ.
        nominal_size: N.
        max_grad_norm: C_g.
        max_curvature: C_H.
        projection: kind of projection.
        proj_dim: k.
        seed: public seed of the projection, None where nothing is random.
        sampler: how the draw was made: ``"exact"`` or ``"secure"``; anything else has **no guarantee**.
        failure_probability: total variation between the draw and the exact mechanism, 0 outside secure mode.
        bounds: where C_g and C_H came from: ``"given"``, ``"public"``, ``"bought"``; or ``"paper"``, read off the private
            data, in which case there is **no guarantee**.
        clipping: ``"separate"`` or ``"joint"``.
        round: which draw of its plan.
        rounds: how many draws the plan has.
        noise: ``"system"``, from the operating system's entropy; or ``"given"``, from a generator of the caller's, whose
            seed others may know: **not guaranteed**.
    """

    epsilon_range: float
    mu: float
    adjacency: str
    epsilon: float
    delta: float
    calibration: str
    radius: float
    regularization: float
    nominal_size: int
    max_grad_norm: float
    max_curvature: float
    projection: str
    proj_dim: int
    seed: int | None
    sampler: str = "exact"
    failure_probability: float = 0.0
    bounds: str = "given"
    clipping: str = "separate"
    round: int = 1
    rounds: int = 1
    noise: str = "system"

    def __post_init__(self) -> None:
        if self.mu != math.inf:
            _check.positive("mu", self.mu)
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        for name in ("epsilon_range", "epsilon", "radius", "max_grad_norm"):
            _check.positive(name, getattr(self, name))
        for name in ("regularization", "max_curvature"):
            _check.non_negative(name, getattr(self, name))
        for name in ("delta", "failure_probability"):
            _check.fraction(name, getattr(self, name))
        for name in ("nominal_size", "proj_dim", "round", "rounds"):
            _check.positive_int(name, getattr(self, name))
        _check.one_of("bounds", self.bounds, BOUNDS)
        _check.one_of("clipping", self.clipping, CLIPPINGS)
        _check.one_of("noise", self.noise, NOISES)
        for name in ("calibration", "projection", "sampler"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a name, got {getattr(self, name)!r}")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise ValueError(f"seed must be a non-negative integer or None, got {self.seed!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite μ becomes None."""
        return {**dataclasses.asdict(self), "mu": None if math.isinf(self.mu) else self.mu}

    @classmethod
    def from_dict(cls, facts: Any) -> Release:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: missing or unknown facts, or values that no release can have.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(facts, Mapping) or set(facts) != names:
            raise ValueError(f"a release has exactly the fields {sorted(names)}")
        try:
            return cls(**{**facts, "mu": math.inf if facts["mu"] is None else facts["mu"]})
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Purchase:
    """A clipping bound bought from the private data as a private quantile: public facts only.

    Attributes:
        epsilon_range: ε₁, a pure ε.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        bound: ``"max_grad_norm"`` or ``"max_curvature"``.
        quantile: which quantile was asked for.
        nominal_size: N.
        noise: as in ``Release``.
    """

    epsilon_range: float
    adjacency: str
    bound: str
    quantile: float
    nominal_size: int
    noise: str = "system"

    mu = math.inf
    failure_probability = 0.0
    delta = 0.0

    def __post_init__(self) -> None:
        _check.positive("epsilon_range", self.epsilon_range)
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        _check.one_of("bound", self.bound, ("max_grad_norm", "max_curvature"))
        _check.fraction("quantile", self.quantile)
        _check.positive_int("nominal_size", self.nominal_size)
        _check.one_of("noise", self.noise, NOISES)

    @property
    def epsilon(self) -> float:
        """What was asked for, which is what it costs."""
        return self.epsilon_range

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def _event_from_dict(facts: Any) -> Release | Purchase:
    """A release, or a purchase, which names a bound.

    Raises:
        ValueError: missing or unknown facts, or values that no such event can have.
    """
    if not isinstance(facts, Mapping) or "bound" not in facts:
        return Release.from_dict(facts)
    names = {f.name for f in dataclasses.fields(Purchase)}
    if set(facts) != names:
        raise ValueError(f"a purchase has exactly the fields {sorted(names)}")
    try:
        return Purchase(**facts)
    except TypeError as error:
        raise ValueError(str(error)) from error


class ExpMAccountant(IAccountant):
    """Privacy accountant for ExpM-Quad releases and DP-SGD steps on the same data.

    ``history`` holds DP-SGD steps as Opacus's (noise_multiplier, sample_rate, steps) triples, so that Opacus's helpers
    work unchanged; ``releases`` holds the exponential-mechanism releases and purchases of bounds.

    Args:
        budget: (ε, δ) that may not be exceeded, declared before the first event; events may then be chosen adaptively.
        ledger_path: an append-only file in which every charge is on disk before its draw; several processes may
            share it. Charges already in it count.

    **Privacy:** ``get_epsilon`` is valid for releases whose budgets were fixed in advance; for budgets chosen after
    looking at earlier releases, declare a ``budget`` (see ``composition``).
    """

    def __init__(
        self, *, budget: tuple[float, float] | None = None, ledger_path: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self.history: list[Steps] = []
        self.releases: list[Release | Purchase] = []
        self.budget = None if budget is None else _budget(budget)
        self._file = None if ledger_path is None else LedgerFile(ledger_path)
        self._plan: _Plan | None = None
        self._refresh()

    def record(self, release: Release | Purchase) -> None:
        """Charge one release or purchase; called before the draw, so that a crash cannot give a free one.

        Raises:
            TypeError: neither a ``Release`` nor a ``Purchase``.
            ValueError: its adjacency differs from what is already in the ledger.
            BudgetExceeded: it would exceed the budget.
            NoGuarantee: there is a budget, and ε does not cover this draw or an earlier one.
        """
        if not isinstance(release, Release | Purchase):
            raise TypeError(f"release must be a Release or a Purchase, got {release!r}")
        with self._exclusive():
            self._check_adjacency(release.adjacency)
            self._check_countable(release)
            planned = self._plan is not None and self._plan.holds(release, self.releases, self.history)
            if not planned:
                self._check_budget([[release]], release.epsilon, release.delta)
            if self._file is not None:
                self._file.append({"release": release.to_dict()})
            self.releases.append(release)
            if self._plan is not None:
                self._plan.charged(release)

    def note(self, release: Release | Purchase) -> None:
        """Keep up with a charge that the leading rank of the same work has made; not a charge of its own.

        Where the ledger is a file, which ranks share, the charge is already in it.
        """
        if self._file is None:
            self.releases.append(release)
        else:
            self._refresh()

    def identity(self) -> str:
        """Everything in the ledger, its budget and which file it is: equal for processes that share it."""
        self._refresh()
        file = None if self._file is None else os.stat(self._file.path).st_ino
        return repr((self.releases, self.history, self.budget, file))

    @contextmanager
    def planned(self, alternatives: Sequence[Sequence[Event]], epsilon: float, delta: float) -> Iterator[None]:
        """Several charges fixed in advance, admitted to the budget together or not at all.

        Args:
            alternatives: what will be charged is one of these lists, which one being decided by public numbers or by
                what the first of them bought; every one has to fit the budget.
            epsilon: what was asked for, for the message.
            delta: likewise.

        Raises:
            BudgetExceeded: one of the lists does not fit; nothing was charged.

        Inside the context, charges that follow the plan are not judged one by one. Should another process charge the
        same ledger in between, they are again.
        """
        self._refresh()
        self._check_countable()
        for plan in alternatives:
            self._check_budget([plan], epsilon, delta)
        try:
            self._plan = _Plan(alternatives, list(self.releases), list(self.history))
            yield
        finally:
            self._plan = None

    def check(self, release: Release | Purchase) -> None:
        """Raise if the release cannot be charged; nothing changes."""
        self.check_adjacency(release.adjacency)
        self._check_countable(release)
        self._check_budget([[release]], release.epsilon, release.delta)

    def check_covered(self, *, sampler: str, noise: str) -> None:
        """Raise if a draw of this kind may not be charged: a budget is a promise, which ε has to cover.

        Raises:
            NoGuarantee: there is a budget, and the sampler is not exact or the noise not the operating system's.
        """
        if self.budget is not None:
            _check_draw(sampler, noise)

    def _check_countable(self, *more: Release | Purchase) -> None:
        """No budget is kept by a ledger for which no ε can be stated without reserve."""
        if self.budget is not None:
            _check_guarantee([*self.releases, *more], promised=True)

    @property
    def guaranteed(self) -> bool:
        """Whether ε covers every entry without reserve: bounds, samplers and noise are all as the proofs need them."""
        self._refresh()
        return all(map(_is_covered, self.releases))

    def _check_budget(self, plans: Sequence[Sequence[Event]], epsilon: float, delta: float) -> None:
        if self.budget is None or any(self.budget.admits_plan(self.releases, self.history, p) for p in plans):
            return
        raise BudgetExceeded(
            f"a release with epsilon={epsilon:g}, delta={delta:g} would exceed the budget epsilon={self.budget.epsilon:g}, "
            f"delta={self.budget.delta:g}; a pure release of at most epsilon={self._remaining():g} still fits"
        )

    def remaining(self) -> float:
        """The largest ε of one more pure release within the budget; infinite without a budget.

        Rounded down to six significant digits.
        """
        self._refresh()
        self._check_countable()
        return self._remaining()

    def _remaining(self) -> float:
        if self.budget is None:
            return math.inf
        low, high = 0.0, curves.bounded_range_for(self.budget.epsilon, self.budget.delta) * (1 + 1e-9)
        for _ in range(60):
            middle = (low + high) / 2
            admitted = self.budget.admits([*self.releases, PlannedEvent(middle)], self.history)
            low, high = (middle, high) if admitted else (low, middle)
        if low < 1e-10 * self.budget.epsilon:  # the filter's slack for rounding is not to be spent
            return 0.0
        digits = 10.0 ** (5 - math.floor(math.log10(low)))
        return math.floor(low * digits) / digits

    def check_adjacency(self, adjacency: str) -> None:
        """Raise if an event under this adjacency cannot share the ledger with what it holds."""
        self._refresh()
        self._check_adjacency(adjacency)

    def _check_adjacency(self, adjacency: str) -> None:
        held = {r.adjacency for r in self.releases} | ({"add_remove"} if self.history else set())
        if held - {adjacency}:
            raise ValueError(
                f"adjacency={adjacency!r} cannot be added to a ledger that counts {(held - {adjacency}).pop()!r}: the "
                "two notions of a neighbour do not compose; use a ledger (engine) of its own"
            )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge one DP-SGD step, as Opacus's optimizer does before it moves the parameters.

        Raises:
            ValueError: the ledger counts replace-one neighbours.
            BudgetExceeded: the step would exceed the budget.
        """
        noise_multiplier, sample_rate, _ = _steps((noise_multiplier, sample_rate, 1))
        with self._exclusive():
            self._check_adjacency("add_remove")
            self._check_countable()
            history = _with_step(self.history, noise_multiplier, sample_rate)
            if self.budget is not None and not self.budget.admits(self.releases, history):
                raise BudgetExceeded(
                    f"one more DP-SGD step would exceed the budget (epsilon={self.budget.epsilon:g}, "
                    f"delta={self.budget.delta:g})"
                )
            if self._file is not None:
                self._file.append({"step": {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}})
            self.history = history

    @overload
    def get_epsilon(self, delta: float = ..., *, return_method: Literal[False] = ...) -> float: ...

    @overload
    def get_epsilon(self, delta: float = ..., *, return_method: Literal[True]) -> tuple[float, str]: ...

    def get_epsilon(self, delta: float = 0.0, *, return_method: bool = False) -> float | tuple[float, str]:
        """ε spent so far at the given δ, by the least of the valid bounds (see ``composition``).

        Args:
            delta: δ in [0, 1); 0 for the pure guarantee, infinite if there were DP-SGD steps.
            return_method: also give the name of the bound.

        Raises:
            NoGuarantee: a release's bounds were read off the private data, or its sampler was not exact.

        Where a ``noise_generator`` was given for a draw, a ``NotGuaranteed`` warning says so.
        """
        _check.fraction("delta", delta)
        self._refresh()
        _check_guarantee(self.releases)
        given = sum(event.noise != "system" for event in self.releases)
        if given:
            warnings.warn(
                f"{given} of {len(self.releases)} draws in this ledger took their noise from a given noise_generator: "
                "epsilon is stated as if nobody could know that noise, which is NOT guaranteed",
                NotGuaranteed,
                stacklevel=3,
            )
        total = total_epsilon(self.releases, self.history, delta)
        return (total.epsilon, total.method) if return_method else total.epsilon

    def __len__(self) -> int:
        return len(self.releases) + sum(int(steps) for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """Name under which the accountant is registered with Opacus."""
        return "expm"

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """The ledger as plain numbers and strings."""
        state: dict[str, Any] = super().state_dict(OrderedDict() if destination is None else destination)
        state["releases"] = [r.to_dict() for r in self.releases]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the ledger by a saved one, after checking every entry.

        Raises:
            ValueError: a state of another accountant, an entry that no event can have left, or a ledger file in use
                (the file is the ledger then, and may not be replaced).
        """
        if self._file is not None:
            raise ValueError("this accountant keeps its ledger in a file (ledger_path), which may not be replaced")
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"a saved ledger is a dictionary, got {type(state_dict).__name__}")
        if state_dict.get("mechanism", self.mechanism()) != self.mechanism():
            raise ValueError(f"the state of a {state_dict['mechanism']!r} accountant cannot be loaded into 'expm'")
        saved, runs = state_dict.get("releases"), state_dict.get("history")
        if "mechanism" not in state_dict or not isinstance(saved, list | tuple) or not isinstance(runs, list | tuple):
            raise ValueError("a saved ledger has the lists 'releases' and 'history'; its 'mechanism' is 'expm'")
        releases, history = [_event_from_dict(facts) for facts in saved], [_steps(run) for run in runs]
        _one_adjacency(releases, history)
        self.history, self.releases = history, releases

    def _refresh(self) -> None:
        """Read in what other processes charged."""
        with self._exclusive():
            pass

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the file's lock, with what other processes charged read in; nothing without a file."""
        if self._file is None:
            yield
            return
        with self._file.locked():
            self._read_file()
            yield

    def _read_file(self) -> None:
        """Make the lists what the file says."""
        if self._file is None:
            return
        releases: list[Release | Purchase] = []
        history: list[Steps] = []
        for entry in self._file.entries():
            try:
                if "release" in entry:
                    releases.append(_event_from_dict(entry["release"]))
                else:
                    run = _steps((entry["step"]["noise_multiplier"], entry["step"]["sample_rate"], 1))
                    history = _with_step(history, run[0], run[1])
            except (KeyError, TypeError, ValueError) as error:
                raise LedgerError(f"{self._file.path} holds an entry that is no release or step: {error}") from error
        try:
            _one_adjacency(releases, history)
        except ValueError as error:
            raise LedgerError(f"{self._file.path}: {error}") from error
        self.releases, self.history = releases, history

    def __repr__(self) -> str:
        steps = sum(steps for _, _, steps in self.history)
        reserved = sum(not _is_covered(event) for event in self.releases)
        reserve = f", not_guaranteed={reserved}" if reserved else ""
        return f"ExpMAccountant(releases={len(self.releases)}, dp_sgd_steps={steps}{reserve})"


@dataclass(frozen=True)
class PlannedEvent:
    """What a release that is not yet calibrated may cost."""

    epsilon_range: float
    mu: float = math.inf
    failure_probability: float = 0.0


class _Plan:
    """Charges that were fixed in advance, and how far they have come."""

    def __init__(self, alternatives: Sequence[Sequence[Event]], releases: list[Event], history: list[Steps]):
        self._open = [list(plan) for plan in alternatives]
        self._expected, self._history = releases, history

    def holds(self, event: Event, releases: Sequence[Event], history: Sequence[Steps]) -> bool:
        """Whether the ledger is as the plan left it, and the event is the next of one of the lists."""
        undisturbed = list(releases) == self._expected and list(history) == self._history
        return undisturbed and any(plan and _within(event, plan[0]) for plan in self._open)

    def charged(self, event: Event) -> None:
        """Cross the event off."""
        self._expected.append(event)
        self._open = [plan[1:] for plan in self._open if plan and _within(event, plan[0])]


def _within(event: Event, planned: Event) -> bool:
    """Whether an event costs no more than was planned: neither in range nor in μ, its own or that of its range."""
    slack = 1 + 1e-9
    mu = min(event.mu, curves.bounded_range_mu(event.epsilon_range))
    cheap = event.epsilon_range <= planned.epsilon_range * slack and mu <= planned.mu * slack
    return cheap and event.failure_probability <= planned.failure_probability


def _budget(budget: tuple[float, float]) -> Filter:
    """(ε, δ) as a filter."""
    if not isinstance(budget, tuple) or len(budget) != 2:
        raise TypeError(f"budget must be a pair (epsilon, delta), got {budget!r}")
    return Filter(_check.positive("budget epsilon", budget[0]), _check.fraction("budget delta", budget[1]))


def _steps(run: Any) -> Steps:
    """A (noise_multiplier, sample_rate, steps) triple that DP-SGD can have left."""
    if not isinstance(run, tuple | list) or len(run) != 3:
        raise ValueError(f"a run of DP-SGD steps is (noise_multiplier, sample_rate, steps), got {run!r}")
    try:
        rate = _check.positive("sample_rate", run[1])
        if rate > 1:
            raise ValueError(f"sample_rate must be at most 1, got {run[1]!r}")
        return _check.positive("noise_multiplier", run[0]), rate, _check.positive_int("steps", run[2])
    except TypeError as error:
        raise ValueError(str(error)) from error


def _check_guarantee(events: Sequence[Release | Purchase], *, promised: bool = False) -> None:
    """Raise for an event that ε does not cover; where a budget promises it, also for noise that was given."""
    for event in events:
        if isinstance(event, Release) and event.bounds == "paper":
            raise NoGuarantee(
                "a release used bounds='paper', which are read off the private data: it is not differentially private, and "
                "no epsilon can be stated for this ledger"
            )
        sampler = event.sampler if isinstance(event, Release) else "exact"
        _check_draw(sampler, event.noise if promised else "system")


def _check_draw(sampler: str, noise: str) -> None:
    """Raise for a draw that ε does not cover."""
    if sampler not in EXACT_SAMPLERS:
        raise NoGuarantee(
            f"sampler={sampler!r} is not known to draw exactly, and what it gets wrong is not covered: no epsilon can be "
            "stated for a ledger with such a release; release with sampler='exact'"
        )
    if noise != "system":
        raise NoGuarantee(
            "noise_generator cannot be used with a budget, which is a promise: whoever knows the generator's seed knows the "
            "noise; leave noise_generator out, or use a ledger without a budget for tests and simulations"
        )


def _is_covered(event: Release | Purchase) -> bool:
    """Whether ε covers an event without reserve."""
    try:
        _check_guarantee([event], promised=True)
    except NoGuarantee:
        return False
    return True


def _one_adjacency(releases: Sequence[Release | Purchase], history: Sequence[Steps]) -> None:
    """Raise if a saved ledger counts two kinds of neighbours."""
    held = {r.adjacency for r in releases} | ({"add_remove"} if history else set())
    if len(held) > 1:
        raise ValueError(f"a ledger counts one kind of neighbours, this one {sorted(held)}")


def _with_step(history: list[Steps], noise_multiplier: float, sample_rate: float) -> list[Steps]:
    """The history with one more step, merged with the last run where it is of the same kind."""
    if history and tuple(history[-1][:2]) == (noise_multiplier, sample_rate):
        return [*history[:-1], (noise_multiplier, sample_rate, history[-1][2] + 1)]
    return [*history, (noise_multiplier, sample_rate, 1)]


if _ACCOUNTANTS.get("expm") is None:  # importing twice must not raise
    register_accountant("expm", ExpMAccountant)
