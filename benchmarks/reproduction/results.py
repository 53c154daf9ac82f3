"""What a reproduction found: curves, the lines beside them, and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from benchmarks.reproduction.settings import FIGURES, RADIUS, Setting
from opacus_expm import _check
from opacus_expm.experiments.journal import read_result


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation of the metric over simulated candidates, against ε.

    Attributes:
        method: a key of ``METHODS``.
        loss: ``"mse"`` or ``"cross_entropy"``.
        proj_dim: k.
        radius: R.
        epsilons: ascending.
        means: one for each ε.
        stds: one for each ε.
        stated: the ε that a ledger states after one release like these candidates; None where it refuses to.
    """

    method: str
    loss: str
    proj_dim: int
    radius: float
    epsilons: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    stated: tuple[float | None, ...]


@dataclass(frozen=True)
class Reference:
    """A method to compare with: one value, or one for each ε.

    Attributes:
        method: ``"zero-shot"``, ``"non-private"``, ``"dp-sgd"`` (tuned) or ``"dp-sgd-paper-rate"``.
        loss: as in ``Curve``.
        epsilons: empty for methods without a budget.
        means: of the metric over seeds.
        stds: its standard deviations over seeds.
    """

    method: str
    loss: str
    epsilons: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """What the curves took.

    Attributes:
        passes: over the private data, one for each subspace, method and loss.
        pass_seconds: mean time of one, its bounds included.
        candidates: models drawn from them.
        draw_seconds: mean time to draw and build one.
        score_seconds: mean time to score one.
    """

    passes: int
    pass_seconds: float
    candidates: int
    draw_seconds: float
    score_seconds: float


@dataclass(frozen=True, repr=False)
class Reproduction:
    """What ``reproduce`` found.

    Attributes:
        task: name.
        metric: ``"accuracy"`` (in percent) or ``"loss"``.
        loss: that of the figures; a second one is there for a claim.
        parameters: p.
        records: private records.
        test_records: on which everything is scored.
        draws: candidates for each point.
        seed: of data, subspaces and noise.
        delta: of DP-SGD.
        setting: what the paper fixes.
        curves: of both figures, and those of a second loss.
        references: the lines beside them.
        cost: of the curves.
        quick: whether the run was made small.
    """

    task: str
    metric: str
    loss: str
    parameters: int
    records: int
    test_records: int
    draws: int
    seed: int
    delta: float
    setting: Setting
    curves: tuple[Curve, ...]
    references: tuple[Reference, ...]
    cost: Cost
    quick: bool = False

    def __repr__(self) -> str:
        return f"Reproduction({self.task!r}, curves={len(self.curves)}, draws={self.draws})"

    def figure(self, kind: str, method: str) -> tuple[Curve, ...]:
        """The curves of one panel: ``"radius"`` has k fixed and R varied, ``"dimension"`` R fixed and k varied."""
        own = [c for c in self.curves if (c.method, c.loss) == (method, self.loss)]
        if _check.one_of("kind", kind, FIGURES) == "radius":
            return tuple(sorted((c for c in own if c.proj_dim == self.setting.proj_dim), key=lambda c: c.radius))
        return tuple(sorted((c for c in own if c.radius == RADIUS), key=lambda c: c.proj_dim))

    def reference(self, method: str, loss: str | None = None) -> Reference:
        """A line.

        Raises:
            KeyError: there is none.
        """
        for line in self.references:
            if (line.method, line.loss) == (method, loss or self.loss):
                return line
        raise KeyError(f"no line for {method!r} with the loss {loss or self.loss!r}")

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> Reproduction:
        """Read what ``to_json`` wrote; the claims are judged again.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            content = read_result(path)
            del content["claims"]
            content["setting"] = Setting(**_tuples(content["setting"]))
            content["cost"] = Cost(**content["cost"])
            content["curves"] = tuple(Curve(**_tuples(c)) for c in content["curves"])
            content["references"] = tuple(Reference(**_tuples(r)) for r in content["references"])
            return cls(**content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"path {str(path)!r} holds no reproduction written by to_json: {error}") from error


def _tuples(facts: Mapping[str, Any]) -> dict[str, Any]:
    """With lists, which JSON has, as tuples."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
