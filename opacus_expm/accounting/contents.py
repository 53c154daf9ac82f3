"""What a ledger holds, as it is read from its file or from a saved state and written back.

A ledger that is read is checked entry by entry: what no event can have left is refused, and so is a ledger that counts two
kinds of neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus_expm.accounting.events import Event, Steps, checked_steps, event_from_dict
from opacus_expm.accounting.filters import Filter, checked_budget
from opacus_expm.accounting.ledger import LedgerError, LedgerFile


@dataclass(frozen=True)
class Contents:
    """Everything that a ledger holds.

    Attributes:
        releases: the events, in the order in which they were charged.
        history: runs of DP-SGD steps, as Opacus keeps them.
        budget: the budget that was declared for the ledger, if there is one.
        claimed: whether a plan has begun that was admitted by its total alone, and so has all of the budget's δ.
    """

    releases: list[Event]
    history: list[Steps]
    budget: Filter | None = None
    claimed: bool = False

    @classmethod
    def from_file(cls, file: LedgerFile) -> Contents:
        """What is in a ledger's file.

        Raises:
            LedgerError: the file is not a sound ledger, or holds what no ledger can hold.
        """
        releases: list[Event] = []
        history: list[Steps] = []
        budget: Filter | None = None
        claimed = False
        for entry in file.entries():
            try:
                if "release" in entry:
                    releases.append(event_from_dict(entry["release"]))
                    claimed = claimed or "claims_delta" in entry
                elif "budget" in entry:
                    if budget is not None:
                        raise ValueError("a budget is declared once")
                    budget = _budget_from_dict(entry["budget"])
                else:
                    run = checked_steps((entry["step"]["noise_multiplier"], entry["step"]["sample_rate"], 1))
                    history = with_step(history, run[0], run[1])
            except (KeyError, TypeError, ValueError) as error:
                raise LedgerError(f"{file.path} holds an entry that is no charge or budget: {error}") from error
        try:
            _check_one_adjacency(releases, history)
        except ValueError as error:
            raise LedgerError(f"{file.path}: {error}") from error
        return cls(releases, history, budget, claimed)

    @classmethod
    def from_state(cls, state: Any, mechanism: str) -> Contents:
        """What is in a saved state.

        Raises:
            ValueError: it is the state of another accountant, or holds what no ledger can hold.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a saved ledger is a dictionary, got {type(state).__name__}")
        if state.get("mechanism", mechanism) != mechanism:
            raise ValueError(f"the state of a {state['mechanism']!r} accountant cannot be loaded into {mechanism!r}")
        saved, runs = state.get("releases"), state.get("history")
        if "mechanism" not in state or not isinstance(saved, list | tuple) or not isinstance(runs, list | tuple):
            raise ValueError(f"a saved ledger has the lists 'releases' and 'history'; its 'mechanism' is {mechanism!r}")
        releases, history = [event_from_dict(facts) for facts in saved], [checked_steps(run) for run in runs]
        _check_one_adjacency(releases, history)
        return cls(releases, history, *_saved_budget(state.get("budget")))

    def to_state(self) -> dict[str, Any]:
        """What is saved in addition to Opacus's own part, which is ``history`` and ``mechanism``."""
        budget = None
        if self.budget is not None:
            budget = {**dataclasses.asdict(self.budget), "claims_delta": self.claimed}
        return {"releases": [event.to_dict() for event in self.releases], "budget": budget}

    def begins_with(self, releases: Sequence[Event], history: Sequence[Steps]) -> bool:
        """Whether these charges are the first ones here, so that none of them would be forgotten."""
        return self.releases[: len(releases)] == list(releases) and _begins_with(self.history, history)

    def __len__(self) -> int:
        """The number of charges; every DP-SGD step is one."""
        return len(self.releases) + sum(int(steps) for _, _, steps in self.history)


# --- entries of the file ----------------------------------------------------------------------------------------------


def event_entry(event: Event, *, claims: bool) -> dict[str, Any]:
    """An event as the file holds it, and whether a plan claims all of δ with it."""
    return {"release": event.to_dict(), **({"claims_delta": True} if claims else {})}


def step_entry(noise_multiplier: float, sample_rate: float) -> dict[str, Any]:
    """One DP-SGD step as the file holds it."""
    return {"step": {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}}


def budget_entry(budget: Filter) -> dict[str, Any]:
    """A budget as the file holds it."""
    return {"budget": dataclasses.asdict(budget)}


def _budget_from_dict(facts: Any) -> Filter:
    """A budget as it was saved.

    Raises:
        ValueError: there are missing or unknown facts, or no budget has these numbers.
    """
    if not isinstance(facts, Mapping) or set(facts) != {"epsilon", "delta"}:
        raise ValueError("a budget has exactly the fields 'epsilon' and 'delta'")
    try:
        return checked_budget((facts["epsilon"], facts["delta"]))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _saved_budget(facts: Any) -> tuple[Filter | None, bool]:
    """The budget of a saved state, and whether a plan claims its δ. States of the time before budgets were saved have none.

    Raises:
        ValueError: no budget has these facts.
    """
    if facts is None:
        return None, False
    claimed = facts.get("claims_delta") if isinstance(facts, Mapping) else None
    if not isinstance(claimed, bool):
        raise ValueError("a saved budget has the fields 'epsilon', 'delta' and 'claims_delta', which is true or false")
    return _budget_from_dict({name: fact for name, fact in facts.items() if name != "claims_delta"}), claimed


# --- neighbours and runs of steps -------------------------------------------------------------------------------------


def adjacencies(releases: Sequence[Event], history: Sequence[Steps]) -> set[str]:
    """The kinds of neighbours that charges count. DP-SGD steps count added and removed records."""
    return {event.adjacency for event in releases} | ({"add_remove"} if history else set())


def with_step(history: list[Steps], noise_multiplier: float, sample_rate: float) -> list[Steps]:
    """The history with one more step, merged with the last run where it is of the same kind."""
    if history and tuple(history[-1][:2]) == (noise_multiplier, sample_rate):
        return [*history[:-1], (noise_multiplier, sample_rate, history[-1][2] + 1)]
    return [*history, (noise_multiplier, sample_rate, 1)]


def _check_one_adjacency(releases: Sequence[Event], history: Sequence[Steps]) -> None:
    """Raise if a ledger that was read counts two kinds of neighbours."""
    held = adjacencies(releases, history)
    if len(held) > 1:
        raise ValueError(f"a ledger counts one kind of neighbours, this one {sorted(held)}")


def _begins_with(history: Sequence[Steps], earlier: Sequence[Steps]) -> bool:
    """Whether runs of DP-SGD steps begin with earlier ones."""
    after, before = _merged(history), _merged(earlier)
    if not before or len(after) < len(before):
        return not before
    last, same = before.pop(), after[len(before)]
    return after[: len(before)] == before and same[:2] == last[:2] and same[2] >= last[2]


def _merged(history: Sequence[Steps]) -> list[Steps]:
    """The same runs, where those of one kind that follow each other are made one."""
    runs: list[Steps] = []
    for noise_multiplier, sample_rate, steps in history:
        if runs and runs[-1][:2] == (noise_multiplier, sample_rate):
            steps += runs.pop()[2]
        runs.append((noise_multiplier, sample_rate, steps))
    return runs
