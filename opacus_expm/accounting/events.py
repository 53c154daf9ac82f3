"""What can stand in a ledger: immutable events, each made of public facts and of what it cost.

``Event`` says what every kind of event has. The ledger, composition and filters know events by these properties alone. To
add a kind, write a frozen dataclass in this file and give it a name in ``KINDS``; no other file changes. The steps that
Opacus's optimizer charges one by one are no events: Opacus keeps them as triples (noise_multiplier, sample_rate, steps), and
so does the ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from opacus_expm import _check
from opacus_expm.mechanism.sensitivity import ADJACENCIES

BOUNDS = ("given", "public", "bought", "paper")  # where C_g and C_H may come from, the last without any guarantee
NOISES = ("system", "given")
EXACT_SAMPLERS = ("exact", "secure")
_COSTS = ("epsilon_range", "mu")  # these may be infinite, which JSON cannot say: there they are None

Steps = tuple[float, float, int]


class NoGuarantee(ValueError):
    """No ε can be stated for the ledger, or no budget kept, because ε does not cover one of its draws.

    Either the bounds of the draw were read off the private data, or its sampler was not exact. Where there is a budget, the
    reason may also be that its noise came from a generator that was given.
    """


class NotGuaranteed(UserWarning):
    """The ε that is stated holds only if the noise of every draw is unknown, and a generator was given for some of them."""


class Cost(Protocol):
    """What an event costs. Composition and filters need to know nothing else about it."""

    @property
    def epsilon_range(self) -> float:
        """Length of the interval that contains the privacy loss, possibly infinite."""

    @property
    def epsilon_pure(self) -> float:
        """ε of pure differential privacy, possibly infinite: the range, or half of it where that is known."""

    @property
    def mu(self) -> float:
        """Parameter of Gaussian differential privacy, possibly infinite."""

    @property
    def failure_probability(self) -> float:
        """Total variation between what was done and the exact mechanism."""

    @property
    def runs(self) -> Sequence[Steps]:
        """The steps of DP-SGD that the event consists of, if it does; its range and its μ do not count then."""


class Event(Cost, Protocol):
    """What every kind of event in a ledger has.

    A kind that is added writes its name into its own facts (``{"kind": self.kind, **…}``). Releases and purchases do not,
    because ledgers held them before events had kinds.
    """

    @property
    def kind(self) -> str:
        """The name of this kind of event, as ``KINDS`` has it."""

    @property
    def adjacency(self) -> str:
        """The neighbours for which the cost holds: ``"add_remove"`` or ``"replace_one"``."""

    @property
    def noise(self) -> str:
        """Where the randomness came from: ``"system"`` or ``"given"``."""

    @property
    def epsilon(self) -> float:
        """The ε that was asked for, for messages."""

    @property
    def delta(self) -> float:
        """The δ that was asked for, for messages."""

    @property
    def flaw(self) -> str | None:
        """Why ε does not cover this event, as a message for the user; None where ε covers it."""

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values, from which ``event_from_dict`` makes an equal event."""

    @classmethod
    def from_dict(cls, facts: Any) -> Event:
        """The inverse of ``to_dict``, for facts without their kind."""


@dataclass(frozen=True)
class PlannedEvent:
    """What an event that is not yet calibrated may cost; ``pure`` as in ``Query``."""

    epsilon_range: float
    mu: float = math.inf
    failure_probability: float = 0.0
    runs: tuple[Steps, ...] = ()
    pure: float | None = None

    @property
    def epsilon_pure(self) -> float:
        """The pure ε that is stated, or the range."""
        return self.epsilon_range if self.pure is None else self.pure


@dataclass(frozen=True)
class Release:
    """One draw that left, or was about to leave: public facts only.

    Attributes:
        epsilon_range: length of the interval that contains the privacy loss: the release is ε_range-DP. It is infinite where
            the draw was calibrated by μ after a bound was bought, because c·W then depends on what was bought.
        mu: parameter of Gaussian differential privacy, possibly infinite. At least one of the two is finite.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        epsilon: the ε that was asked for, for all rounds of the plan together.
        delta: the δ that was asked for, for all rounds of the plan together.
        calibration: name of the calibration that was used.
        radius: R, the radius of the ball from which the draw comes.
        regularization: λ, the weight of the ridge.
        nominal_size: N, the public number of records.
        max_grad_norm: C_g, the bound to which gradients were clipped.
        max_curvature: C_H, the bound to which curvatures were clipped.
        projection: name of the kind of projection.
        proj_dim: k, the dimension of the subspace.
        seed: public seed of the projection, None where nothing in it is random.
        sampler: how the draw was made: ``"exact"`` or ``"secure"``; anything else has **no guarantee**.
        failure_probability: total variation between the draw and the exact mechanism, 0 outside secure mode.
        bounds: where C_g and C_H came from: ``"given"``, ``"public"``, ``"bought"``; or ``"paper"``, read off the private
            data, in which case there is **no guarantee**.
        round: which draw of its plan this is, counted from 1.
        rounds: how many draws the plan has.
        noise: ``"system"``, from the operating system's entropy; or ``"given"``, from a generator of the caller's, whose
            seed others may know: **not guaranteed**. Ledgers that were written before this was recorded are read as
            ``"system"``.
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
    round: int = 1
    rounds: int = 1
    noise: str = "system"

    kind = "release"
    runs = ()

    def __post_init__(self) -> None:
        for name in _COSTS:
            if getattr(self, name) != math.inf:
                _check.positive(name, getattr(self, name))
        if self.epsilon_range == self.mu == math.inf:
            raise ValueError("epsilon_range or mu must be finite: a release has a cost")
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        for name in ("epsilon", "radius", "max_grad_norm"):
            _check.positive(name, getattr(self, name))
        for name in ("regularization", "max_curvature"):
            _check.non_negative(name, getattr(self, name))
        for name in ("delta", "failure_probability"):
            _check.fraction(name, getattr(self, name))
        for name in ("nominal_size", "proj_dim", "round", "rounds"):
            _check.positive_int(name, getattr(self, name))
        _check.one_of("bounds", self.bounds, BOUNDS)
        _check.one_of("noise", self.noise, NOISES)
        for name in ("calibration", "projection", "sampler"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a name, got {getattr(self, name)!r}")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise ValueError(f"seed must be a non-negative integer or None, got {self.seed!r}")

    @property
    def epsilon_pure(self) -> float:
        """The range."""
        return self.epsilon_range

    @property
    def flaw(self) -> str | None:
        """Why ε does not cover this release: its bounds or its sampler. None where it does."""
        if self.bounds == "paper":
            return (
                "a release used bounds='paper', which are read off the private data: it is not differentially private, and "
                "no epsilon can be stated for this ledger"
            )
        return _flaw_of_sampler(self.sampler)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values; an infinite range or μ becomes None."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, facts: Any) -> Release:
        """The inverse of ``to_dict``.

        Earlier versions also wrote down how gradient and curvature were clipped, separately or jointly. That is passed over,
        because what such a release cost is in its range and its μ.

        Raises:
            ValueError: there are missing or unknown facts, or values that no release can have.
        """
        if isinstance(facts, Mapping) and "clipping" in facts:
            _check.one_of("clipping", facts["clipping"], ("separate", "joint"))
            facts = {name: fact for name, fact in facts.items() if name != "clipping"}
        return _read(cls, facts, later={"noise"})


@dataclass(frozen=True)
class Purchase:
    """A clipping bound bought from the private data as a private quantile: public facts only.

    Attributes:
        epsilon_range: ε₁, a pure ε.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        bound: ``"max_grad_norm"`` or ``"max_curvature"``.
        quantile: which quantile was asked for.
        nominal_size: N, the public number of records.
        receipt: a random name. Statistics with this bound carry it too, so that only the ledger that paid for the bound
            releases from them. Empty in ledgers that were written before there were receipts.
        noise: ``"system"`` or ``"given"``, as in ``Release``.
    """

    epsilon_range: float
    adjacency: str
    bound: str
    quantile: float
    nominal_size: int
    receipt: str = ""
    noise: str = "system"

    kind = "purchase"
    runs = ()
    mu = math.inf
    failure_probability = 0.0
    delta = 0.0
    flaw = None

    def __post_init__(self) -> None:
        _check.positive("epsilon_range", self.epsilon_range)
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        _check.one_of("bound", self.bound, ("max_grad_norm", "max_curvature"))
        _check.fraction("quantile", self.quantile)
        _check.positive_int("nominal_size", self.nominal_size)
        if not isinstance(self.receipt, str):
            raise TypeError(f"receipt must be a name, got {self.receipt!r}")
        _check.one_of("noise", self.noise, NOISES)

    @property
    def epsilon(self) -> float:
        """The ε that was asked for, which is what the purchase costs."""
        return self.epsilon_range

    epsilon_pure = epsilon

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, facts: Any) -> Purchase:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: there are missing or unknown facts, or values that no purchase can have.
        """
        return _read(cls, facts, later={"receipt", "noise"})


@dataclass(frozen=True)
class Query:
    """Something that was asked of the private data on the way to a model, and answered with noise: public facts only.

    Attributes:
        what: what was asked, such as ``"metric"``, ``"bound"``, ``"directions"``, ``"length"`` or ``"choice"``.
        epsilon: the ε that was asked for, for all queries of the plan together.
        delta: the δ that was asked for, for all queries of the plan together.
        nominal_size: N, the public number of records.
        epsilon_range: of a choice by the exponential mechanism; infinite for others.
        mu: of a sum with Gaussian noise, or of a choice in Gaussian terms; possibly infinite.
        run: of Gaussian sums over Poisson samples, (noise_multiplier, sample_rate, steps), charged in one go; else None.
        number: which query of its kind in the plan, counted from 1.
        adjacency: ``"add_remove"`` or ``"replace_one"``; a run is for the first.
        noise: ``"system"`` or ``"given"``, as in ``Release``.
        pure: ε of a draw whose privacy loss fills [−ε, ε], so that its range is 2ε; None where the range is the pure ε.
        failure_probability: total variation between the answer and the exact one, 0 outside secure mode.
    """

    what: str
    epsilon: float
    delta: float
    nominal_size: int
    epsilon_range: float = math.inf
    mu: float = math.inf
    run: Steps | None = None
    number: int = 1
    adjacency: str = "add_remove"
    noise: str = "system"
    pure: float | None = None
    failure_probability: float = 0.0

    kind = "query"
    flaw = None

    def __post_init__(self) -> None:
        if not isinstance(self.what, str) or not self.what:
            raise TypeError(f"what must be a name, got {self.what!r}")
        _check.positive("epsilon", self.epsilon)
        for name in ("delta", "failure_probability"):
            _check.fraction(name, getattr(self, name))
        for name in ("nominal_size", "number"):
            _check.positive_int(name, getattr(self, name))
        for name in _COSTS:
            if getattr(self, name) != math.inf:
                _check.positive(name, getattr(self, name))
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        _check.one_of("noise", self.noise, NOISES)
        if self.run is not None:
            object.__setattr__(self, "run", checked_steps(self.run))
            if self.adjacency != "add_remove" or min(self.epsilon_range, self.mu) < math.inf:
                raise ValueError("a run of sampled sums is counted under add_remove, and by its steps alone")
        elif self.epsilon_range == self.mu == math.inf:
            raise ValueError("epsilon_range, mu or run must be given: a query has a cost")
        if self.pure is not None and _check.positive("pure", self.pure) * 2 != self.epsilon_range:
            raise ValueError(f"epsilon_range must be 2·pure where pure is given, got {self.epsilon_range!r}")

    @property
    def epsilon_pure(self) -> float:
        """The pure ε that is stated, or the range."""
        return self.epsilon_range if self.pure is None else self.pure

    @property
    def runs(self) -> tuple[Steps, ...]:
        """The run, where there is one."""
        return () if self.run is None else (self.run,)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        return {"kind": self.kind, **_plain(dataclasses.asdict(self) | {"run": self.run and list(self.run)})}

    @classmethod
    def from_dict(cls, facts: Any) -> Query:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: there are missing or unknown facts, or values that no query can have.
        """
        return _read(cls, facts, later={"pure", "failure_probability"})


# Every kind of event that a ledger may hold, by name.
KINDS: dict[str, type[Event]] = {"release": Release, "purchase": Purchase, "query": Query}


# --- facts and events -----------------------------------------------------------------------------------------------


def event_from_dict(facts: Any) -> Event:
    """The event that has these facts, of whatever kind.

    Facts without a ``kind`` are those of a purchase if they name a bound, else those of a release.

    Raises:
        ValueError: the kind is unknown, there are missing or unknown facts, or values that no such event can have.
    """
    if not isinstance(facts, Mapping) or "kind" not in facts:
        purchase = isinstance(facts, Mapping) and "bound" in facts
        return KINDS["purchase" if purchase else "release"].from_dict(facts)
    kind = facts["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"kind must be one of {sorted(KINDS)}, got {kind!r}; a newer version of opacus-expm may have written this ledger"
        )
    return KINDS[kind].from_dict({name: fact for name, fact in facts.items() if name != "kind"})


def check_is_event(event: object) -> None:
    """Raise if something is no event that a ledger may hold.

    Raises:
        TypeError: it is of none of the ``KINDS``.
    """
    if not isinstance(event, tuple(KINDS.values())):
        names = " or a ".join(kind.__name__ for kind in KINDS.values())
        raise TypeError(f"release must be a {names}, got {event!r}")


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts as JSON can hold them: None for an infinite cost."""
    return {name: None if name in _COSTS and math.isinf(fact) else fact for name, fact in facts.items()}


_Kind = TypeVar("_Kind", Release, Purchase, Query)


def _read(cls: type[_Kind], facts: Any, *, later: Collection[str]) -> _Kind:
    """An event from plain facts, of which those that were added ``later`` may be missing."""
    names = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(facts, Mapping) or set(facts) | set(later) != names:
        raise ValueError(f"a {cls.kind} has exactly the fields {sorted(names)}")
    unlimited: dict[str, Any] = {cost: math.inf for cost in _COSTS if cost in facts and facts[cost] is None}
    try:
        return cls(**{**facts, **unlimited})
    except TypeError as error:
        raise ValueError(str(error)) from error


def checked_steps(run: Any) -> Steps:
    """A (noise_multiplier, sample_rate, steps) triple that DP-SGD can have left.

    Raises:
        ValueError: it is no such triple.
    """
    if not isinstance(run, tuple | list) or len(run) != 3:
        raise ValueError(f"a run of DP-SGD steps is (noise_multiplier, sample_rate, steps), got {run!r}")
    try:
        rate = _check.positive("sample_rate", run[1])
        if rate > 1:
            raise ValueError(f"sample_rate must be at most 1, got {run[1]!r}")
        return _check.positive("noise_multiplier", run[0]), rate, _check.positive_int("steps", run[2])
    except TypeError as error:
        raise ValueError(str(error)) from error


# --- what ε covers --------------------------------------------------------------------------------------------------


def check_guarantee(events: Sequence[Event], *, promised: bool = False) -> None:
    """Raise for an event that ε does not cover.

    Args:
        events: what a ledger holds, or would hold.
        promised: whether there is a budget, which is a promise. Noise from a generator that was given breaks it.

    Raises:
        NoGuarantee: ε does not cover one of the events.
    """
    for event in events:
        if event.flaw is not None:
            raise NoGuarantee(event.flaw)
        if promised:
            _check_noise(event.noise)


def check_draw(*, sampler: str, noise: str) -> None:
    """Raise for a way to draw that no budget may be spent on.

    Raises:
        NoGuarantee: the sampler is not exact, or the noise is not the operating system's.
    """
    if (flaw := _flaw_of_sampler(sampler)) is not None:
        raise NoGuarantee(flaw)
    _check_noise(noise)


def is_covered(event: Event) -> bool:
    """Whether ε covers an event without reserve."""
    return event.flaw is None and event.noise == "system"


def _flaw_of_sampler(sampler: str) -> str | None:
    """Why ε does not cover what this sampler draws; None where it does."""
    if sampler in EXACT_SAMPLERS:
        return None
    return (
        f"sampler={sampler!r} is not known to draw exactly, and what it gets wrong is not covered: no epsilon can be "
        "stated for a ledger with such a release; release with sampler='exact'"
    )


def _check_noise(noise: str) -> None:
    """Raise for noise that somebody may know, where a budget promises that nobody does."""
    if noise != "system":
        raise NoGuarantee(
            "noise_generator cannot be used with a budget, which is a promise: whoever knows the generator's seed knows the "
            "noise; leave noise_generator out, or use a ledger without a budget for tests and simulations"
        )
