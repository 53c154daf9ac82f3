"""The ledger: what was released, and what it cost.

``ExpMAccountant`` keeps the list of events (see ``events``) and turns it into ε(δ). It is registered with Opacus as
``"expm"`` and goes on accepting DP-SGD steps, so that both kinds of training on the same data share one total.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, overload

from opacus.accountants import IAccountant, register_accountant
from opacus.accountants.registry import _ACCOUNTANTS

from opacus_expm import _check
from opacus_expm._warnings import warn
from opacus_expm.accounting.admission import Admission
from opacus_expm.accounting.composition import total_epsilon
from opacus_expm.accounting.contents import (
    Contents,
    adjacencies,
    budget_entry,
    event_entry,
    step_entry,
    with_step,
)
from opacus_expm.accounting.events import (
    Cost,
    Event,
    NotGuaranteed,
    Purchase,
    Steps,
    check_draw,
    check_guarantee,
    check_is_event,
    checked_steps,
    is_covered,
)
from opacus_expm.accounting.filters import BudgetExceeded, Filter, Room, checked_budget
from opacus_expm.accounting.ledger import LedgerFile


class NotCopied:
    """Mixin: copying and pickling are refused, because a copy would be a second budget for the same data."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is neither copied nor pickled: a copy would be a second budget for the same data. Share "
            "the object itself; let processes share a file (ledger_path=); save it with state_dict() or save_checkpoint()"
        )


class ExpMAccountant(NotCopied, IAccountant):
    """Privacy accountant for ExpM-Quad releases and DP-SGD steps on the same data.

    ``history`` holds DP-SGD steps as Opacus's (noise_multiplier, sample_rate, steps) triples, so that Opacus's helpers
    work unchanged; ``releases`` holds all other events, such as releases and purchases of bounds.

    Args:
        budget: (ε, δ) that may not be exceeded, declared before the first event; events may then be chosen adaptively. It
            belongs to the ledger from then on, in its file and in what is saved of it, and cannot be changed. None goes on
            with the budget of the ledger, if it has one.
        ledger_path: an append-only file in which every charge is on disk before its draw; several processes may
            share it. Charges already in it count.

    Raises:
        ValueError: the ledger was declared to have another budget.

    A budget that is declared for a ledger with events counts them, and a warning says what it does not cover: events that
    were chosen by looking at earlier ones, before there was a filter to hold them.

    Threads may share an accountant: a charge is judged and written down before another is judged. Processes may not,
    because each would have a ledger of its own; they share a file.

    **Privacy:** ``get_epsilon`` is valid for releases whose budgets were fixed in advance; for budgets chosen after
    looking at earlier releases, declare a ``budget`` (see ``filters``).
    """

    def __init__(
        self, *, budget: tuple[float, float] | None = None, ledger_path: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self._lock, self._process = threading.RLock(), os.getpid()
        self.history: list[Steps] = []
        self.releases: list[Event] = []
        self._budget: Filter | None = None
        self._claimed = False  # whether a plan has begun that was admitted by its total alone, and so has all of δ
        # The plan that has begun; later a weak reference, so that one that was abandoned reserves nothing.
        self._begun: Callable[[], Admission | None] = lambda: None
        declared = None if budget is None else checked_budget(budget)
        self._file = None if ledger_path is None else LedgerFile(ledger_path)
        with self._exclusive():
            if declared is not None and self._budget is None:
                if len(self):
                    _warn_of_a_late_budget(declared, len(self))
                if self._file is not None:
                    self._file.append(budget_entry(declared))
                self._budget = declared
            self._check_same_budget(declared)

    @property
    def budget(self) -> Filter | None:
        """The (ε, δ) that was declared for this ledger."""
        return self._budget

    def _check_same_budget(self, other: Filter | None) -> None:
        """Raise if a budget is named that is not the ledger's."""
        if other is not None and self._budget is not None and other != self._budget:
            raise ValueError(
                f"budget=({other.epsilon:g}, {other.delta:g}) is not the ledger's, which is ({self._budget.epsilon:g}, "
                f"{self._budget.delta:g}): it was declared for all that is charged there, and cannot be changed. Leave "
                "budget out to go on with it"
            )

    def record(self, release: Event, *, admission: Admission | None = None) -> None:
        """Charge one event. This is called before the draw, so that a crash cannot give a free one.

        Args:
            release: the event that is about to happen.
            admission: the plan that it follows. A charge that does not, or that comes after something else was charged
                besides, is judged like one without a plan.

        Raises:
            TypeError: it is of no kind that a ledger holds (see ``events.KINDS``).
            ValueError: its adjacency differs from what is already in the ledger.
            BudgetExceeded: it would exceed the budget.
            NoGuarantee: there is a budget, and ε does not cover this draw or an earlier one.
        """
        check_is_event(release)
        with self._exclusive():
            self._check_adjacency(release.adjacency)
            self._check_countable(release)
            followed, running = self._followed(admission, release), self._running()
            if followed is None:
                self._check_room([release], release.epsilon, release.delta)
            claims = followed is not None and followed.by_total
            self._claimed = self._claimed or claims  # before the charge: an interrupt must not come in between
            if self._file is not None:
                self._file.append(event_entry(release, claims=claims))
            self.releases.append(release)
            self._keep_up(release, followed, running)

    def note(self, release: Event, *, admission: Admission | None = None) -> None:
        """Keep up with a charge that the leading rank of the same work has made. Nothing is charged again.

        Where the ledger is a file, which ranks share, the charge is already in it.
        """
        with self._lock:
            followed, running = self._followed(admission, release), self._running()
            with self._exclusive():
                if self._file is None:
                    self._claimed = self._claimed or (followed is not None and followed.by_total)
                    self.releases.append(release)
                self._keep_up(release, followed, running)

    def _followed(self, admission: Admission | None, release: Event) -> Admission | None:
        """The plan, if the release is the next of its charges."""
        if admission is None or not admission.follows(release, self.releases, self.history):
            return None
        return admission

    def _keep_up(self, release: Event, followed: Admission | None, running: Admission | None) -> None:
        """Tell plans what was charged: the plan that the charge follows, and the plan beside whose reservation it fits."""
        if followed is not None:
            followed.charged(release)
            if running is None:
                self._begun = weakref.ref(followed)
        for plan in (followed, running):
            if plan is not None:
                plan.keep_up(self.releases, self.history)

    def identity(self) -> str:
        """A text that tells all that the ledger holds, its budget and its file, the same in processes that share it."""
        self._refresh()
        file = None if self._file is None else os.stat(self._file.path).st_ino
        return repr((self.releases, self.history, self.budget, self._claimed, file))

    def admit(
        self,
        alternatives: Sequence[Sequence[Cost]],
        epsilon: float,
        delta: float,
        *,
        instead_of: Admission | None = None,
    ) -> Admission:
        """Admit several charges that are fixed in advance to the budget, all of them or none.

        Args:
            alternatives: what will be charged is one of these lists, and every one has to fit. Which one it is has to be
                settled by public numbers before the first charge. A list may also be chosen by what the first of the
                charges bought, if the lists agree up to there, and if one theorem for adaptively chosen mechanisms covers
                them all: basic composition, where the purchases are pure and every list ends with one draw that is
                (ε′, δ)-DP; or Gaussian composition, where the n-th charge of every list is μ_n-GDP.
            epsilon: the ε that was asked for, for the message.
            delta: the δ that was asked for, for the message.
            instead_of: a plan that will be given up for this one, so that it reserves nothing any more.

        Returns:
            What the charges have to name (``record``) so that they are not judged one by one. From the first of them on,
            the others are reserved: what is charged besides has to fit beside them. The reservation ends with the last
            charge, with ``Admission.end`` or ``give_up``, and when nothing refers to the admission any more. It does not
            outlive the process and is not seen by others: a plan that they disturb has its charges judged one by one.

        Raises:
            BudgetExceeded: one of the lists does not fit; nothing was charged.
        """
        with self._exclusive():
            self._check_countable()
            by_total = False
            for plan in alternatives:
                if self._room(instead_of).fits(plan, self.history):
                    continue
                if self.budget is None or len(self) or not self.budget.admits_total(plan):
                    self._check_room(plan, epsilon, delta, but=instead_of)
                by_total = True
            return Admission(alternatives, self.releases, self.history, by_total=by_total)

    def give_up(self) -> None:
        """Give up the plan that has begun, if there is one: what is left of it is no longer reserved.

        A training loop that is not going to be finished keeps its reservation for as long as its module exists; this ends
        it. Should the loop go on all the same, its charges are judged one by one.
        """
        with self._lock:
            plan = self._begun()
            if plan is not None:
                plan.end()

    def _running(self, but: Admission | None = None) -> Admission | None:
        """The plan that has begun, is not complete and was not given up, if the ledger is as it left it."""
        plan = self._begun()
        if plan is None or plan is but or not plan.rest or not plan.undisturbed(self.releases, self.history):
            return None
        return plan

    def _room(self, but: Admission | None = None) -> Room:
        """What still fits the budget, beside what a running plan has reserved."""
        running = self._running(but)
        if running is None:
            return Room(self.budget, self.releases, self._claimed)
        return Room(self.budget, self.releases, self._claimed, running.rest, running.by_total)

    def check(self, release: Event) -> None:
        """Raise if the release cannot be charged; nothing changes."""
        with self._exclusive():
            self._check_adjacency(release.adjacency)
            self._check_countable(release)
            self._check_room([release], release.epsilon, release.delta)

    def check_covered(self, *, sampler: str, noise: str) -> None:
        """Raise if a draw of this kind may not be charged: a budget is a promise, which ε has to cover.

        Raises:
            NoGuarantee: there is a budget, and the sampler is not exact or the noise not the operating system's.
        """
        if self.budget is not None:
            check_draw(sampler=sampler, noise=noise)

    def _check_countable(self, *more: Event) -> None:
        """Raise if there is a budget and ε does not cover every event, with these, without reserve."""
        if self.budget is not None:
            check_guarantee([*self.releases, *more], promised=True)

    @property
    def guaranteed(self) -> bool:
        """Whether ε covers every entry without reserve: bounds, samplers and noise are all as the proofs need them."""
        self._refresh()
        return all(map(is_covered, self.releases))

    def _fits(self, events: Sequence[Cost], history: list[Steps], *, but: Admission | None = None) -> bool:
        """Whether these events, and the steps up to here, fit the budget; if need be once abandoned plans are collected.

        A training loop refers to itself, so that one that was abandoned keeps its reservation until it is collected.
        """
        if self._room(but).fits(events, history):
            return True
        return self._running(but) is not None and gc.collect() > 0 and self._room(but).fits(events, history)

    def _check_room(
        self, events: Sequence[Cost], epsilon: float, delta: float, *, but: Admission | None = None
    ) -> None:
        """Raise if these events do not fit the budget; ``epsilon`` and ``delta`` are what was asked for."""
        if self.budget is None or self._fits(events, self.history, but=but):
            return
        room = self._room()
        raise BudgetExceeded(
            f"a release with epsilon={epsilon:g}, delta={delta:g} would exceed the budget epsilon={self.budget.epsilon:g}, "
            f"delta={self.budget.delta:g}; a pure release of at most epsilon={room.remaining(self.history):g} still "
            f"fits{room.why_less()}"
        )

    def remaining(self) -> float:
        """The largest ε of one more pure release within the budget; infinite without a budget.

        Rounded down to six significant digits. What a plan that has begun has reserved is not free.
        """
        with self._exclusive():
            self._check_countable()
            if self._running() is not None:
                gc.collect()  # a training loop that was abandoned holds on to itself
            return self._room().remaining(self.history)

    def check_paid(self, receipts: Set[str]) -> None:
        """Raise if bounds with these receipts were not all bought from this ledger.

        Raises:
            ValueError: what was paid elsewhere would be missing in this ledger's total.
        """
        with self._exclusive():
            held = {event.receipt for event in self.releases if isinstance(event, Purchase)}
        if not receipts <= held:
            raise ValueError(
                "the bounds of these statistics were bought, and charged to another ledger: release from them with the "
                "engine that gathered them, or with one that shares its ledger (accountant= or ledger_path=); or gather "
                "them again with this engine"
            )

    def check_adjacency(self, adjacency: str) -> None:
        """Raise if an event under this adjacency cannot share the ledger with what it holds."""
        with self._exclusive():
            self._check_adjacency(adjacency)

    def _check_adjacency(self, adjacency: str) -> None:
        """Raise if the ledger counts other neighbours."""
        others = adjacencies(self.releases, self.history) - {adjacency}
        if others:
            raise ValueError(
                f"adjacency={adjacency!r} cannot be added to a ledger that counts {others.pop()!r}: the "
                "two notions of a neighbour do not compose; use a ledger (engine) of its own"
            )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge one DP-SGD step, as Opacus's optimizer does before it moves the parameters.

        Raises:
            ValueError: the ledger counts replace-one neighbours.
            BudgetExceeded: the step would exceed the budget.
        """
        noise_multiplier, sample_rate, _ = checked_steps((noise_multiplier, sample_rate, 1))
        with self._exclusive():
            self._check_adjacency("add_remove")
            self._check_countable()
            history, running = with_step(self.history, noise_multiplier, sample_rate), self._running()
            if self.budget is not None and not self._fits([], history):
                raise BudgetExceeded(
                    f"one more DP-SGD step would exceed the budget (epsilon={self.budget.epsilon:g}, "
                    f"delta={self.budget.delta:g}){self._room().why_less()}"
                )
            if self._file is not None:
                self._file.append(step_entry(noise_multiplier, sample_rate))
            self.history = history
            if running is not None:
                running.keep_up(self.releases, self.history)

    @overload
    def get_epsilon(
        self, delta: float = ..., alphas: object = ..., *, return_method: Literal[False] = ...
    ) -> float: ...

    @overload
    def get_epsilon(
        self, delta: float = ..., alphas: object = ..., *, return_method: Literal[True]
    ) -> tuple[float, str]: ...

    def get_epsilon(
        self, delta: float = 0.0, alphas: object = None, *, return_method: bool = False
    ) -> float | tuple[float, str]:
        """ε spent so far at the given δ, by the least of the valid bounds (see ``composition``).

        Args:
            delta: δ in [0, 1); 0 for the pure guarantee, infinite if there were DP-SGD steps.
            alphas: Rényi orders, as Opacus's ``"rdp"`` accountant takes them. They play no part: orders are chosen here, and
                the Rényi total is one of several.
            return_method: also give the name of the bound.

        Raises:
            NoGuarantee: a release's bounds were read off the private data, or its sampler was not exact.

        Where a ``noise_generator`` was given for a draw, a ``NotGuaranteed`` warning says so.
        """
        _check.fraction("delta", delta)
        with self._exclusive():
            releases, history = list(self.releases), list(self.history)
        check_guarantee(releases)
        given = sum(event.noise != "system" for event in releases)
        if given:
            warn(
                f"{given} of {len(releases)} draws in this ledger took their noise from a given noise_generator: epsilon is "
                "stated as if nobody could know that noise, which is NOT guaranteed",
                NotGuaranteed,
            )
        total = total_epsilon(releases, history, delta)
        return (total.epsilon, total.method) if return_method else total.epsilon

    def __len__(self) -> int:
        return len(self.releases) + sum(int(steps) for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """Name under which the accountant is registered with Opacus."""
        return "expm"

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """The ledger and its budget as plain numbers and strings."""
        state: dict[str, Any] = super().state_dict(OrderedDict() if destination is None else destination)
        state.update(Contents(self.releases, self.history, self._budget, self._claimed).to_state())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a saved ledger and its budget, after checking every entry.

        It must begin with what this one holds, if anything. A budget declared here for a ledger that was saved without one
        counts everything in it: perhaps nothing remains then.

        Raises:
            ValueError: a state of another accountant; an entry that no event can have left; a ledger that lacks charges of
                this one, which would be forgotten; another budget; or a ledger file in use (the file is the ledger then).
        """
        if self._file is not None:
            raise ValueError("this accountant keeps its ledger in a file (ledger_path), which may not be replaced")
        saved = Contents.from_state(state_dict, self.mechanism())
        with self._exclusive():
            self._check_same_budget(saved.budget)
            if not saved.begins_with(self.releases, self.history):
                raise ValueError(
                    "this ledger holds charges with which the saved one does not begin: loading it would make spent budget "
                    "disappear. Load it with a new engine or accountant; or load the weights alone, a checkpoint's "
                    "'module_state_dict'"
                )
            more = (saved.releases, saved.history) != (self.releases, self.history)
            if self._budget is not None and saved.budget is None and more:
                _warn_of_a_late_budget(self._budget, len(saved))
            self.history, self.releases = saved.history, saved.releases
            self._budget, self._claimed = saved.budget or self._budget, saved.claimed or self._claimed

    def _refresh(self) -> None:
        """Read in what other processes charged."""
        with self._exclusive():
            pass

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock between threads, and the file's between processes, with what these have charged read in.

        Raises:
            RuntimeError: in a process that was forked from the accountant's own, whose ledger would be a copy.
        """
        if os.getpid() != self._process:  # before the lock, which another thread may have held when it was copied
            raise RuntimeError(
                "this accountant belongs to the process that made it: a forked process has a copy, and what is charged "
                "there is missing in the original. Use ExpMAccountant(ledger_path=...) in each process, with one file"
            )
        with self._lock:
            if self._file is None:
                yield
                return
            with self._file.locked():
                held = Contents.from_file(self._file)
                self.releases, self.history = held.releases, held.history
                self._budget, self._claimed = held.budget, held.claimed
                yield

    def __repr__(self) -> str:
        held = Counter(event.kind for event in self.releases)
        counts = {"releases": held["release"], "purchases": held["purchase"], "queries": held["query"]}
        told = [f"{name}={n}" for name, n in counts.items() if n or (name == "releases" and not held["query"])]
        told.append(f"dp_sgd_steps={sum(steps for _, _, steps in self.history)}")
        reserved = sum(not is_covered(event) for event in self.releases)
        if reserved:
            told.append(f"not_guaranteed={reserved}")
        if self._budget is not None:
            told.append(f"budget=({self._budget.epsilon:g}, {self._budget.delta:g})")
        return f"ExpMAccountant({', '.join(told)})"


def _warn_of_a_late_budget(budget: Filter, events: int) -> None:
    """Say what a budget covers that was not declared first."""
    warn(
        f"budget=({budget.epsilon:g}, {budget.delta:g}) is declared for a ledger that holds {events} charges already. They "
        "count against it, but it covers them only if they, and the budget, were settled before any of them was made: what "
        "was chosen by looking at earlier results without a budget is not covered. Declare a budget when a ledger begins",
    )


if _ACCOUNTANTS.get("expm") is None:  # importing twice must not raise
    register_accountant("expm", ExpMAccountant)
