"""Does the mechanism keep its word? Audits that put a number found beside the number claimed.

| audit | sees | gives |
|---|---|---|
| ``audit_pair`` | the densities from which the engine draws on two data sets | the exact privacy loss between them |
| ``worst_pair``, ``audit_worst`` | the same, on data as bad as the clipping bounds allow | the worst of a search |
| ``black_box`` | released models only, loader in and model out | a lower bound on ε, with confidence |
| ``black_box_dp_sgd`` | the same for Opacus DP-SGD | the same, for comparison |
| ``paper_practice`` | bounds read off the private data | a pair of data sets that breaks the claim |

An exact audit looks through the engine's own window: a sampler that keeps the density it is asked to draw from. Everything
before the draw (loader, gradients, projection, clipping, sums, calibration) is what a release would have done, and the
claim is what the ledger then says. The black-box audits see nothing of that; theirs are lower bounds, valid whatever the
code does: if the true ε were smaller, a bound this large would have had a probability below 1 − confidence.

**Privacy:** an audit's report is NOT private. It shows how a record shows in the private densities, and is for data the
auditor may look at. ``audit_pair`` and the black boxes, which take data, warn; the others make their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import beta
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus_expm import _check
from opacus_expm._tables import markdown
from opacus_expm.accounting.composition import total_epsilon
from opacus_expm.baselines import dp_sgd
from opacus_expm.bounds import Bounds, checked_bounds
from opacus_expm.engine import ExpMQuadEngine
from opacus_expm.gathering import loaders
from opacus_expm.gathering.clipping import Sensitivity
from opacus_expm.gathering.model import call, check_module, compute_dtype, outputs_of, tensor_digest, working_copy
from opacus_expm.gathering.randomness import Generators
from opacus_expm.gathering.views import Views
from opacus_expm.mechanism.calibration import calibrate
from opacus_expm.mechanism.density import Array, BallGaussian
from opacus_expm.mechanism.privacy_loss import QUADRATURE_DIM, PrivacyLoss, Quadrature, Sampled
from opacus_expm.mechanism.sampling import Exact
from opacus_expm.mechanism.sensitivity import ADJACENCIES

Arguments = Mapping[str, Any]  # of ``make_private_expm``, without model and loader
Score = Callable[[nn.Module], float]

_PULLS = (1, 30, 1000)  # records in the base that pull in one direction
_ANGLES = [i * math.pi / 8 for i in range(8)]
_OVERSHOOT = 10.0  # records are made this many times larger than their bounds, so that clipping has to work
_FAINT = 1e-6  # size of a Jacobian row that carries a gradient and (nearly) no curvature
_DRAWS = 20_000
_CHOICE = 1e-2  # of the error probability, where an event is chosen


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        subject: what was audited.
        method: how: ``"exact"``, ``"quadrature"``, ``"draws"`` or ``"black box"``.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        asked: ε that was asked for.
        delta: δ at which the two ε's below are compared.
        claimed: ε at δ that the ledger states.
        found: ε at δ that the audit found; of ``"draws"`` and ``"black box"`` a lower bound.
    """

    subject: str
    method: str
    adjacency: str
    asked: float
    delta: float
    claimed: float
    found: float

    @property
    def ratio(self) -> float:
        """Found over claimed."""
        return self.found / self.claimed

    @property
    def holds(self) -> bool:
        """Whether the claim stands."""
        return self.found <= self.claimed


@dataclass(frozen=True)
class Report:
    """What an audit found."""

    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim stands."""
        return all(f.holds for f in self.findings)

    def table(self) -> str:
        """All findings, in Markdown."""
        headings = ("audited", "adjacency", "by", "asked ε", "at δ", "claimed ε", "found ε", "ratio", "")
        rows = [
            (
                *(f.subject, f.adjacency, f.method, f"{f.asked:g}", f"{f.delta:g}"),
                *(f"{f.claimed:.4f}", f"{f.found:.4f}", f"{f.ratio:.3f}", "holds" if f.holds else "BROKEN"),
            )
            for f in self.findings
        ]
        return markdown(headings, rows)

    def __str__(self) -> str:
        return self.table()


# --- the exact audit of two data sets ---------------------------------------------------------------------------------


class _Window:
    """A sampler that draws exactly and keeps the density it was given."""

    density: BallGaussian | None = None

    def sample(self, density: BallGaussian, generator: np.random.Generator, draws: int = 1) -> Array:
        """Draws ξ, one a row."""
        self.density = density
        return Exact().sample(density, generator, draws)


def audit_pair(
    model: nn.Module,
    loader: DataLoader[Any],
    neighbour: DataLoader[Any],
    arguments: Arguments,
    *,
    subject: str = "engine",
    draws: int = _DRAWS,
    seed: int = 0,
) -> Report:
    """The exact privacy loss of one release between two neighbouring data sets, beside what the ledger claims.

    Three findings: the exact maximum of the loss (for δ = 0), quadrature (up to three dimensions) and a lower bound from
    the loss at draws.

    Args:
        model: as for ``make_private_expm``.
        loader: the one data set.
        neighbour: the other one: with one record more or less, or with one replaced.
        arguments: what ``make_private_expm`` would be called with beside model and loader; at least ``epsilon``,
            ``radius`` and ``proj_dim``. The projection's seed is 0 and N the size of ``loader`` unless they are given.
        subject: a name for the report.
        draws: from each density.
        seed: of these draws.

    Raises:
        TypeError, ValueError: bad input, data sets that cannot be neighbours under the adjacency, or a release that is not
            one draw from one density given public numbers: several rounds, bought bounds or sampled curvature. Those
            are for ``black_box``.

    The curvature must be exact: for sequences and for more than 64 outputs, whose curvature is probed at random, pass
    ``max_curvature=0``. Secure mode draws from the same density; its own failures are in the ledger, not here.

    Where records are random themselves (augmentation, views, dropout in a functional call), the claim is about any fixed
    randomness of the records that both data sets have (``gathering.randomness``). That is what is compared then, one
    record at a time, for one draw of this randomness; generators that the model holds as attributes cannot be fixed.

    **Privacy:** the report is NOT private, and says so in a warning.
    """
    _warn("audit_pair()")
    _check.positive_int("draws", draws)
    settled = _settled(loader, neighbour, arguments)
    loss, claimed = observed_loss(model, loader, neighbour, settled)
    delta = float(settled.get("delta", 0.0))
    found = {}
    if delta == 0:
        found["exact"] = loss.largest()
    if loss.before.dim <= QUADRATURE_DIM:
        found["quadrature"] = Quadrature(loss).epsilon(delta)
    found["draws"] = Sampled(loss, draws, np.random.default_rng(_check.seed("seed", seed))).epsilon(delta)
    facts = (settled["adjacency"], float(settled["epsilon"]), delta, claimed)
    return Report(tuple(Finding(subject, method, *facts, epsilon) for method, epsilon in found.items()))


_NOT_PRIVATE = "looks at the private densities or draws from them without charge: its report is NOT private"


def _warn(name: str) -> None:
    """Say what a report is."""
    warnings.warn(f"{name} {_NOT_PRIVATE}; use it on data that you may look at", UserWarning, stacklevel=3)


@contextmanager
def _synthetic_data() -> Iterator[None]:
    """Without the warnings for data that are somebody's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"\w+\(\) {_NOT_PRIVATE}")
        warnings.filterwarnings("ignore", message="bounds='paper' reads the clipping bounds off the private data")
        yield


def observed_loss(
    model: nn.Module, loader: DataLoader[Any], neighbour: DataLoader[Any], arguments: Arguments
) -> tuple[PrivacyLoss, float]:
    """The densities that two releases would be drawn from, as a privacy loss, and the ε that the ledger states for one.

    Where the ledger refuses to state any (``bounds="paper"``), it is the ε that was asked for.

    **Privacy:** not private. Each release is charged to a ledger that is thrown away.
    """
    before, claimed = _observed(model, loader, arguments)
    if _is_random(model, loader, arguments.get("views")):
        loader, neighbour = _with_own_streams(loader, neighbour, arguments.get("views"))
        before, claimed = _observed(model, loader, arguments)
    after, other = _observed(model, neighbour, arguments)
    return PrivacyLoss(before, after), min(claimed, other)


def _observed(model: nn.Module, loader: DataLoader[Any], arguments: Arguments) -> tuple[BallGaussian, float]:
    """The density of one release, and the ε that the ledger states for it."""
    engine, window = ExpMQuadEngine(distributed=False), _Window()
    engine.make_private_expm(model, loader, sampler=window, **arguments)
    assert window.density is not None
    return window.density, _claim(engine, float(arguments.get("delta", 0.0)), arguments)


def _is_random(model: nn.Module, loader: DataLoader[Any], views: Views | None) -> bool:
    """Whether records that are read and run twice come out differently: inputs, outputs, or a gradient."""
    module, part = working_copy(check_module(model)), loaders.part_of(loader)
    device, dtype = next(module.parameters()).device, compute_dtype(module)
    parameters = [p for p in module.parameters() if p.requires_grad]

    def seen() -> Iterator[str]:
        for inputs, targets in loaders.batches(
            part, device=device, dtype=dtype, max_physical_batch_size=None, progress=False
        ):
            for view in [inputs] if views is None else views(inputs):
                outputs = outputs_of(call(module, view))
                # Weights that no two records share, so that what is drawn for them does not cancel.
                weights = torch.linspace(1, 2, outputs.numel()).to(outputs).sqrt().view_as(outputs)
                gradient = torch.autograd.grad((weights * outputs).sum(), parameters, allow_unused=True)
                yield tensor_digest(*_tensors((view, targets, outputs, gradient)))

    with Generators.of(part, module, views).refreshed():
        return list(seen()) != list(seen())


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _OwnStreams(Dataset[Any]):
    """Records, each with randomness of its own: what is drawn until the next is read follows from a key and its place.

    Args:
        loader: of the records.
        holders: of generators beside the loader.
        key: of the randomness.
    """

    def __init__(self, loader: DataLoader[Any], holders: Sequence[object], key: str):
        self._loader, self._generators, self._key = loader, Generators.of(loader, *holders), key
        self.order = list(loaders.visited(loader) or ())

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        self._generators.reseed(Random(f"{self._key} {place}").randbytes)
        return self._loader.dataset[self.order[place]]

    def contents(self) -> Iterator[str]:
        """Of every record, under the randomness of its place."""
        for place in range(len(self)):
            with self._generators.refreshed():
                found = tensor_digest(*_tensors(self._loader.collate_fn([self[place]])))
            yield found


def _with_own_streams(
    loader: DataLoader[Any], neighbour: DataLoader[Any], *holders: object
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Both loaders, one record at a time, the common records first and with the same randomness in both."""
    key = secrets.token_hex()
    both = [_OwnStreams(records, holders, key) for records in (loader, neighbour)]
    contents = zip(both[0].contents(), both[1].contents(), strict=False)
    first = next((place for place, (one, other) in enumerate(contents) if one != other), -1)
    longest = max(map(len, both))
    for records in both:
        if len(records) == longest:  # it has the record that makes the difference, or both have one
            records.order.append(records.order.pop(first))
    first_loader, second_loader = (
        DataLoader(records, batch_size=1, collate_fn=original.collate_fn)
        for records, original in zip(both, (loader, neighbour), strict=True)
    )
    return first_loader, second_loader


def _claim(engine: ExpMQuadEngine, delta: float, arguments: Arguments) -> float:
    """What the ledger states at δ for exact draws with unknown noise; what was asked for with ``bounds="paper"``."""
    if arguments.get("bounds") == "paper":
        return float(arguments["epsilon"])
    return total_epsilon(engine.accountant.releases, engine.accountant.history, delta).epsilon


def _settled(loader: DataLoader[Any], neighbour: DataLoader[Any], arguments: Arguments) -> dict[str, Any]:
    """Arguments under which two releases differ by their data alone; or an error."""
    for name in ("epsilon", "radius", "proj_dim"):
        if name not in arguments:
            raise ValueError(f"arguments must hold {name!r}, as make_private_expm needs it")
    for name in ("model", "loader", "sampler"):
        if name in arguments:
            raise ValueError(f"arguments must not hold {name!r}: an audit chooses it; leave it out")
    settled = {"adjacency": "add_remove", "projection_seed": 0, "progress": False, **arguments}
    size = loaders.dataset_size(loaders.check_loader(loader))
    other_size = loaders.dataset_size(loaders.check_loader(neighbour, "neighbour"))
    if size is None or other_size is None:
        raise ValueError("loader and neighbour must have data sets of known size: iterable ones cannot be compared")
    if abs(size - other_size) != (0 if settled["adjacency"] == "replace_one" else 1):
        raise ValueError(
            f"loader and neighbour cannot be neighbours under adjacency={settled['adjacency']!r}: their sizes must "
            f"{'agree' if settled['adjacency'] == 'replace_one' else 'differ by one'}"
        )
    if settled.get("nominal_size") is None:
        settled["nominal_size"] = size
    if settled.get("rounds", 1) != 1:
        raise ValueError("an exact audit is of one draw: rounds must be 1; audit rounds with black_box")
    if settled.get("curvature_samples") is not None:
        raise ValueError("an exact audit needs exact curvature: leave curvature_samples out, or use black_box")
    if settled.get("views") is not None and _bounds(settled)["max_curvature"] != 0:
        raise ValueError(
            "an exact audit needs exact curvature, and views have it probed: pass max_curvature=0, leave views out, or use "
            "black_box"
        )
    known = settled.get("public_loader") is not None or settled.get("bounds") == "paper"
    if not known and None in _bounds(settled).values():
        raise ValueError(
            "an exact audit needs public bounds: pass max_grad_norm and max_curvature or a public_loader in arguments; "
            "bought bounds are random, and are for black_box"
        )
    return settled


def _bounds(arguments: Arguments) -> Bounds:
    """As the engine reads them: None where one has to be measured or bought."""
    bounds = arguments.get("max_grad_norm"), arguments.get("max_curvature")
    return checked_bounds(*bounds, arguments.get("projection", "stiefel"), arguments.get("clipping", "separate"))


# --- the worst that the clipping bounds allow -------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The public numbers of one release, for audits that make their own data; as in ``make_private_expm``."""

    epsilon: float = 1.0
    delta: float = 0.0
    calibration: str = "range"
    adjacency: str = "add_remove"
    radius: float = 0.7
    max_grad_norm: float = 1.3
    max_curvature: float = 4.0
    regularization: float = 0.0
    nominal_size: int = 100
    proj_dim: int = 2

    def __post_init__(self) -> None:
        _check.one_of("adjacency", self.adjacency, ADJACENCIES)
        _check.positive("max_grad_norm", self.max_grad_norm)
        _check.non_negative("max_curvature", self.max_curvature)
        _check.positive_int("proj_dim", self.proj_dim)

    def arguments(self) -> dict[str, Any]:
        """For ``make_private_expm``: in the full space of a model with ``proj_dim`` parameters."""
        return {**dataclasses.asdict(self), "proj_dim": None, "criterion": nn.MSELoss(), "progress": False}

    def sensitivity(self) -> Sensitivity:
        """Of records with more outputs than parameters."""
        return Sensitivity(self.max_grad_norm, self.max_curvature, self.proj_dim == 1, self.adjacency)


@dataclass(frozen=True)
class Record:
    """A record's place within the clipping bounds, in the plane of the first two coordinates.

    Attributes:
        gradient: 1 or 0: at the bound C_g, or none.
        angle: of the gradient.
        curvature: ``"none"``, ``"line"`` (rank one, at the bound C_H) or ``"full"`` (C_H·I).
        line: angle of the line.
    """

    gradient: float
    angle: float
    curvature: str
    line: float = 0.0

    def quadratic(self, setting: Setting) -> tuple[Array, Array]:
        """Gradient g and curvature H."""
        k = setting.proj_dim
        g = self.gradient * setting.max_grad_norm * _direction(self.angle, k)
        if self.curvature == "none":
            return g, np.zeros((k, k))
        if self.curvature == "full":
            return g, setting.max_curvature * np.eye(k)
        v = _direction(self.line, k)
        return g, setting.max_curvature * np.outer(v, v)


@dataclass(frozen=True)
class Pair:
    """Two neighbouring data sets: a base, with one record that the other lacks, or has replaced.

    Attributes:
        setting: for which they were made.
        pull: records of the base with a gradient at the bound, all in one direction, and no curvature.
        pull_angle: that direction.
        stiff: records of the base with curvature C_H·I and no gradient.
        record: the one that makes the difference.
        replaced: what stands in its place in the neighbour, None for nothing.
    """

    setting: Setting
    pull: int
    pull_angle: float
    stiff: int
    record: Record
    replaced: Record | None = None

    def loss(self, inverse_temperature: float) -> PrivacyLoss:
        """The privacy loss at the given temperature, straight from the formulas."""
        densities = []
        for last in (self.replaced, self.record):
            gradient = self.pull * self.setting.max_grad_norm * _direction(self.pull_angle, self.setting.proj_dim)
            curvature = self.stiff * self.setting.max_curvature * np.eye(self.setting.proj_dim)
            if last is not None:
                g, h = last.quadratic(self.setting)
                gradient, curvature = gradient + g, curvature + h
            values, vectors = np.linalg.eigh(curvature)
            precision = inverse_temperature * (values + self.setting.regularization * self.setting.nominal_size)
            linear = -inverse_temperature * (vectors.T @ gradient)
            densities.append(BallGaussian(precision, linear, self.setting.radius, vectors))
        return PrivacyLoss(densities[0], densities[1])

    def data(self) -> tuple[nn.Module, DataLoader[Any], DataLoader[Any]]:
        """The same as a model and two loaders, for the whole engine; the base has one more record, without any effect.

        The model is linear, f(x) = xθ at θ = 0 with x ∈ R^{m×k} and m = k + 1 outputs: under mean squared error a record
        (x, y) has g = −(2/m)xᵀy and H = (2/m)xᵀx, which can be anything. Gradients and curvatures are made ten times
        larger than their bounds.
        """
        k = self.setting.proj_dim
        linear = nn.Linear(k, 1, bias=False).double()
        nn.init.zeros_(linear.weight)
        idle = Record(0.0, 0.0, "none")
        base = [idle, *[Record(1.0, self.pull_angle, "none")] * self.pull, *[Record(0.0, 0.0, "full")] * self.stiff]
        loaders = []
        for last in (self.replaced, self.record):
            records = base if last is None else [*base, last]
            rows = {r: self._row(r) for r in set(records)}
            x, y = (torch.stack([rows[r][i] for r in records]) for i in (0, 1))
            loaders.append(DataLoader(TensorDataset(x, y), batch_size=256))
        return nn.Sequential(linear, nn.Flatten()), loaders[0], loaders[1]

    def _row(self, record: Record) -> tuple[Tensor, Tensor]:
        """Input and target of one record."""
        g, h = (_OVERSHOOT * part for part in record.quadratic(self.setting))
        m = self.setting.proj_dim + 1
        values, vectors = np.linalg.eigh(h)
        x = np.vstack([_FAINT * g, np.sqrt(np.clip(values, 0, None) * m / 2)[:, None] * vectors.T])
        y = np.zeros(m)
        y[0] = -m / (2 * _FAINT)
        return torch.from_numpy(x), torch.from_numpy(y)


def _direction(angle: float, dim: int) -> Array:
    """A unit vector in the plane of the first two coordinates; in one dimension, its sign."""
    if dim == 1:
        return np.array([math.copysign(1.0, math.cos(angle))])
    return np.concatenate([[math.cos(angle), math.sin(angle)], np.zeros(dim - 2)])


def worst_pair(setting: Setting) -> Pair:
    """Search for the neighbours that show the most: the worst record within the bounds, on the worst base.

    All combinations of a gradient at several angles to the base's pull, curvature of rank 0, 1 (at several angles) and k,
    on bases that pull from not at all to a thousand records strong, soft and stiff; for replace-one with the opposite
    gradient and every kind of curvature in its place. For δ = 0 the exact largest loss decides, and the best is refined in
    its angles. For δ > 0 it is quadrature's δ at the claimed ε, and everything is on one line, where gradients and
    curvatures add up; in k dimensions the pair is placed along the first axis.
    """
    on_line = setting.delta > 0 or setting.proj_dim == 1
    calibrated = calibrate(
        setting.sensitivity(),
        epsilon=setting.epsilon,
        delta=setting.delta,
        radius=setting.radius,
        regularization=setting.regularization,
        nominal_size=setting.nominal_size,
        calibration=setting.calibration,
    )
    c = calibrated.inverse_temperature

    def shows(pair: Pair) -> float:
        if setting.delta == 0:
            return pair.loss(c).largest()
        try:
            line = dataclasses.replace(pair, setting=dataclasses.replace(setting, proj_dim=1))
            return Quadrature(line.loss(c)).delta(setting.epsilon)
        except ValueError:  # beyond what quadrature resolves
            return 0.0

    best = max(_candidates(setting, plane=not on_line), key=shows)
    if on_line:
        return best

    def turned(angles: Array) -> Pair:
        record = dataclasses.replace(best.record, line=best.record.line + float(angles[1]))
        replaced = best.replaced
        if replaced is not None:
            replaced = dataclasses.replace(replaced, line=replaced.line + float(angles[2]))
        return dataclasses.replace(
            best, pull_angle=best.pull_angle + float(angles[0]), record=record, replaced=replaced
        )

    refined = minimize(
        lambda angles: -shows(turned(angles)),
        np.zeros(3),
        method="Nelder-Mead",
        options={"maxfev": 150, "initial_simplex": np.vstack([np.zeros(3), 0.2 * np.eye(3)])},
    )
    return max(best, turned(refined.x), key=shows)


def _candidates(setting: Setting, *, plane: bool) -> Iterator[Pair]:
    """What ``worst_pair`` tries first, in a plane or on a line."""
    curved = setting.max_curvature > 0
    replacing = setting.adjacency == "replace_one"
    angles = (_ANGLES[::2] if replacing else _ANGLES) if plane else [0.0]
    lines = [Record(1.0, 0.0, "line", a) for a in angles] if curved else []
    full = [Record(g, 0.0, "full") for g in (0.0, 1.0)] if curved else []
    records = [Record(1.0, 0.0, "none"), *lines, *full]
    others: list[Record | None] = [None]
    if replacing:
        across = [Record(1.0, math.pi, "line", a) for a in angles] if curved else []
        others = [Record(1.0, math.pi, "none"), *across, *([Record(0.0, 0.0, "none")] if curved else [])]
    # A ridge holds the pull back: strengths at which the mean comes to lie inside the ball, close to its edge
    ridge = setting.regularization * setting.nominal_size
    held = (
        [round(share * setting.radius * ridge / setting.max_grad_norm) for share in (0.5, 0.8, 0.95)] if ridge else []
    )
    strengths = sorted({*_PULLS, *held} - {0})
    bases = [(0, 0.0, 0), *((t, a, 0) for t in strengths for a in _pull_angles(plane))]
    if curved:
        bases += [(0, 0.0, 10), *((30, a, 10) for a in _pull_angles(plane))]
    for record, replaced, (pull, angle, stiff) in itertools.product(records, others, bases):
        yield Pair(setting, pull, angle, stiff, record, replaced)


def _pull_angles(plane: bool) -> list[float]:
    """Directions of the base's pull, where the record's gradient points along the first axis."""
    return [a + turn for turn in (0.0, math.pi) for a in _ANGLES[::2]] if plane else [0.0, math.pi]


def audit_worst(setting: Setting, *, draws: int = _DRAWS, seed: int = 0) -> Report:
    """Search for the worst pair, make data of it, and audit the whole engine on them.

    The loss at draws is that of the worst pair's records on a base without a pull.

    **Privacy:** synthetic data only.
    """
    pair = worst_pair(setting)
    options: dict[str, Any] = {"subject": setting.calibration, "draws": draws, "seed": seed}
    with _synthetic_data():
        findings = audit_pair(*pair.data(), setting.arguments(), **options).findings
        if setting.delta == 0 and pair.pull > 0:
            # No draw comes near the worst point of a base that pulls hard: the same records without the pull show more.
            calm = audit_pair(*dataclasses.replace(pair, pull=0).data(), setting.arguments(), **options).findings
            findings = (*findings[:-1], calm[-1])
    return Report(findings)


# --- black boxes ------------------------------------------------------------------------------------------------------


def lower_bound(first: Array, second: Array, *, delta: float = 0.0, confidence: float = 0.95) -> float:
    """A lower bound on ε from scores of releases on two neighbouring data sets.

    For any event E, (ε, δ)-DP says P(E) ≤ e^ε·Q(E) + δ, so ε ≥ ln((P(E) − δ)/Q(E)). The event, a score below or above a
    threshold, under either of the two data sets, is chosen on the first half of each sample; on the other half
    Clopper-Pearson bounds replace both probabilities, each with half of the error probability.

    Args:
        first: scores on the one data set, independent.
        second: scores on the other.
        delta: δ of the statement.
        confidence: probability that the bound is one.

    Returns:
        The bound, 0 where nothing can be told.
    """
    samples = [np.asarray(sample, dtype=np.float64) for sample in (first, second)]
    if any(sample.ndim != 1 or sample.size < 4 for sample in samples):
        raise ValueError("first and second must each hold at least 4 scores, in one dimension")
    if not all(np.isfinite(sample).all() for sample in samples):
        raise ValueError("first and second must hold finite scores: let the score of a useless model be a number, too")
    _check.fraction("delta", delta)
    error = (1 - _check.fraction("confidence", confidence)) / 2
    chosen, judged = zip(*((s[: s.size // 2], s[s.size // 2 :]) for s in samples), strict=True)

    def bounds(parts: Sequence[Array], thresholds: Array, error: float) -> Array:
        """Lower bounds on ε by (orientation, role, threshold)."""
        sizes = [part.size for part in parts]
        below = [np.searchsorted(np.sort(part), thresholds, side="right") for part in parts]
        found = []
        for counts in (below, [n - b for n, b in zip(sizes, below, strict=True)]):
            for one, other in ((0, 1), (1, 0)):
                hits, misses = counts[one], counts[other]
                with np.errstate(invalid="ignore"):  # the quantiles of degenerate laws
                    low = np.where(hits > 0, beta.ppf(error, hits, sizes[one] - hits + 1), 0.0)
                    high = np.where(misses < sizes[other], beta.ppf(1 - error, misses + 1, sizes[other] - misses), 1.0)
                found.append(np.log(np.maximum(low - delta, 1e-300) / high))
        return np.array(found)

    thresholds = np.unique(np.quantile(np.concatenate(chosen), np.linspace(0.002, 0.998, 499)))
    # Far stricter bounds for the choice: the best of many noisy ones would be an event too rare to be judged.
    merits = bounds(chosen, thresholds, _CHOICE * error)
    event, place = np.unravel_index(np.argmax(merits), merits.shape)
    return max(0.0, float(bounds(judged, thresholds[place : place + 1], error)[event, 0]))


def black_box(
    model: nn.Module,
    loader: DataLoader[Any],
    neighbour: DataLoader[Any],
    arguments: Arguments,
    score: Score,
    *,
    releases: int = 1000,
    draws_per_pass: int = 1,
    delta: float | None = None,
    confidence: float = 0.95,
    subject: str = "engine",
) -> Report:
    """Tell two neighbouring data sets apart by released models alone: a lower bound on ε, beside the claim.

    Args:
        model: as for ``make_private_expm``.
        loader: the one data set.
        neighbour: the other one.
        arguments: what ``make_private_expm`` would be called with beside model and loader.
        score: of a released model; the loss of the record that makes the difference is a good one.
        releases: models from each data set.
        draws_per_pass: 1 makes every release a call of its own, from loader to model; more takes that many simulated
            draws from each pass, which have the law of a release and are much faster. They are independent only if a pass
            has no randomness of its own, so bounds and projection must be given then, and records must not be random.
        delta: δ of the comparison; that of the arguments by default.
        confidence: probability that the bound is one.
        subject: a name for the report.

    **Privacy:** the report is NOT private, and says so in a warning.
    """
    _warn("black_box()")
    _check.positive_int("releases", releases)
    _check.positive_int("draws_per_pass", draws_per_pass)
    settled = {"progress": False, "adjacency": "add_remove", "delta": 0.0, **arguments}
    if settled.get("nominal_size") is None:
        settled["nominal_size"] = loaders.dataset_size(loaders.check_loader(loader))
    if draws_per_pass > 1:
        fixed = settled.get("proj_dim") is None or settled.get("projection_seed") is not None
        if not fixed or None in _bounds(settled).values() or settled.get("rounds", 1) != 1:
            raise ValueError(
                "draws_per_pass > 1 needs passes without randomness: give max_grad_norm, max_curvature and projection_seed "
                "and leave rounds out, or use draws_per_pass=1"
            )
    at = settled["delta"] if delta is None else _check.fraction("delta", delta)
    engine = ExpMQuadEngine(distributed=False)
    engine.make_private_expm(model, loader, **settled)
    claimed = _claim(engine, at, settled)
    scores = []
    for records in (loader, neighbour):
        if draws_per_pass == 1:
            calls = (
                ExpMQuadEngine(distributed=False).make_private_expm(model, records, **settled) for _ in range(releases)
            )
            scores.append(np.array([float(score(module)) for module in calls]))
        else:
            passes = math.ceil(releases / draws_per_pass)
            found = [_simulated(model, records, settled, score, draws_per_pass) for _ in range(passes)]
            scores.append(np.concatenate(found)[:releases])
    bound = lower_bound(scores[0], scores[1], delta=at, confidence=confidence)
    return Report((Finding(subject, "black box", settled["adjacency"], float(settled["epsilon"]), at, claimed, bound),))


def _simulated(model: nn.Module, loader: DataLoader[Any], arguments: dict[str, Any], score: Score, draws: int) -> Array:
    """Scores of many draws from one pass."""
    engine = ExpMQuadEngine(distributed=False)

    def of(method: Callable[..., Any]) -> dict[str, Any]:
        names = set(inspect.signature(method).parameters)
        return {name: value for name, value in arguments.items() if name in names}

    gathering = {name: value for name, value in of(engine.gather).items() if name != "epsilon"}
    statistics = engine.gather(model, loader, **gathering)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"simulate\(\) draws models that are NOT releases")
        return engine.simulate(statistics, evaluate=score, draws=draws, **of(engine.simulate))


def black_box_dp_sgd(
    model: nn.Module,
    dataset: Dataset[Any],
    neighbour: Dataset[Any],
    criterion: nn.Module,
    arguments: Arguments,
    score: Score,
    *,
    releases: int = 1000,
    confidence: float = 0.95,
    seed: int | None = None,
    subject: str = "Opacus DP-SGD",
) -> Report:
    """The same for Opacus DP-SGD. Arguments as in ``black_box``, but data sets, and ``arguments`` those of ``dp_sgd``.

    Opacus divides by the number of records, so the two data sets must have the same: let a record without gradient stand
    where the canary is not.

    **Privacy:** the report is NOT private, and says so in a warning.
    """
    _warn("black_box_dp_sgd()")
    _check.positive_int("releases", releases)
    if len(dataset) != len(neighbour):  # type: ignore[arg-type]
        raise ValueError("dataset and neighbour must have the same number of records: Opacus divides by it")
    epsilon, delta = float(arguments["epsilon"]), float(arguments["delta"])
    scores = []
    for number, records in enumerate((dataset, neighbour)):
        seeds = [None if seed is None else seed + 2 * i + number for i in range(releases)]
        runs = (dp_sgd(model, records, criterion, seed=own, **arguments) for own in seeds)
        scores.append(np.array([float(score(module)) for module in runs]))
    bound = lower_bound(scores[0], scores[1], delta=delta, confidence=confidence)
    return Report((Finding(subject, "black box", "add_remove", epsilon, delta, epsilon, bound),))


@dataclass(frozen=True)
class Canary:
    """A small model, and two data sets that differ in one record which stands out as far as its bounds allow.

    One parameter θ = 0; the canary's loss is (3/2)(θ + 1/3)², with gradient 1 and curvature 3, and every other record
    has neither. With R = 1, C_g = 1, C_H = 3 and no ridge its utility has the whole range W₁ of the calibration, its own
    loss is the most powerful score, and the rest of the data are silent, which suits a test with a few ten thousand releases
    best (by search over ridge, pull and r = RC_H/C_g).
    """

    silent: int = 1  # records without effect

    def model(self) -> nn.Module:
        """The pretrained model."""
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return model

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        """Without the canary, a silent record in its place; and with it."""
        silent, x, y = torch.zeros(self.silent, 1, dtype=torch.float64), math.sqrt(1.5), -1 / math.sqrt(6)
        first, second = (torch.cat([silent, torch.tensor([[v]], dtype=torch.float64)]) for v in (x, y))
        nothing = torch.zeros_like(first)
        return TensorDataset(nothing, nothing), TensorDataset(first, second)

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Without the canary, and with it: one record more."""
        without, with_it = self.datasets()
        return (
            DataLoader(TensorDataset(*(t[: self.silent] for t in without.tensors)), batch_size=64),
            DataLoader(with_it, batch_size=64),
        )

    def arguments(self, epsilon: float) -> dict[str, Any]:
        """For ``make_private_expm``."""
        return {
            "epsilon": epsilon,
            "radius": 1.0,
            "proj_dim": None,
            "criterion": nn.MSELoss(),
            "max_grad_norm": 1.0,
            "max_curvature": 3.0,
            "regularization": 0.0,
            "nominal_size": self.silent,
        }

    def dp_sgd_arguments(self, epsilon: float, delta: float) -> dict[str, Any]:
        """For ``dp_sgd``: one step on all records, where one of them shows most."""
        return {
            "epsilon": epsilon,
            "delta": delta,
            "learning_rate": 0.01,
            "max_grad_norm": 1.0,
            "batch_size": self.silent + 1,
            "epochs": 1,
            "momentum": 0.0,
        }

    def score(self, module: nn.Module) -> float:
        """The canary's loss."""
        theta = float(next(module.parameters()).detach().sum())
        return 1.5 * (theta + 1 / 3) ** 2


# --- the source paper's practice --------------------------------------------------------------------------------------


def paper_practice(epsilon: float = 1.0, *, records: int = 100, factor: float = 10.0) -> Report:
    """Bounds read off the private data and inflated, as in the source paper: a pair of data sets that breaks the claim.

    D holds ``records`` pairs x = 1, y = −½ for the model f(x) = θx at θ = 0, under mean squared error; D′ one more, with x
    and y ``factor`` times as large. That one record raises J̄ and Ē ``factor``-fold, both bounds factor²-fold, and lowers c
    as much: on D the density falls by c times n utilities across the ball, on D′ it is nearly flat. The loss grows with
    n and has no bound; the claimed ε does not move.

    **Privacy:** synthetic data only.
    """
    _check.positive("factor", factor)
    x = torch.ones(_check.positive_int("records", records) + 1, 1, dtype=torch.float64)
    x[-1] = factor
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    without, with_it = (DataLoader(TensorDataset(part, -part / 2), batch_size=256) for part in (x[:-1], x))
    arguments = {
        "epsilon": epsilon,
        "radius": 1.0,
        "proj_dim": None,
        "criterion": nn.MSELoss(),
        "regularization": 0.0,
        "bounds": "paper",
        "calibration": "paper",
    }
    with _synthetic_data():
        loss, claimed = observed_loss(model, without, with_it, _settled(without, with_it, arguments))
    found = loss.largest()
    return Report((Finding("bounds='paper'", "exact", "add_remove", epsilon, 0.0, claimed, found),))


# --- all of it --------------------------------------------------------------------------------------------------------


def audit_exact(epsilon: float = 1.0, delta: float = 1e-5, *, seed: int = 0) -> Report:
    """The worst pairs of all three calibrations under both adjacencies, in two dimensions, and of ``range`` in twenty.

    **Privacy:** synthetic data only.
    """
    found: list[Finding] = []
    for adjacency in ("add_remove", "replace_one"):
        base = Setting(epsilon, adjacency=adjacency)
        settings = {
            "range, k=2": base,
            "paper, k=2": dataclasses.replace(base, calibration="paper"),
            "gaussian, k=2": dataclasses.replace(base, calibration="gaussian", delta=delta, regularization=10.0),
            "range, k=20": dataclasses.replace(base, proj_dim=20),
        }
        for subject, setting in settings.items():
            findings = audit_worst(setting, seed=seed).findings
            found.extend(dataclasses.replace(f, subject=subject) for f in findings)
    return Report(tuple(found))


def audit_black_box(
    epsilon: float = 1.0,
    delta: float = 1e-5,
    *,
    releases: int = 1000,
    draws: int = 80_000,
    seed: int | None = None,
) -> Report:
    """The canary in this engine and in Opacus DP-SGD: whole releases of each, and draws of many releases from one pass.

    **Privacy:** synthetic data only.
    """
    canary = Canary()
    model, loaders, datasets = canary.model(), canary.loaders(), canary.datasets()
    arguments = canary.arguments(epsilon)
    if seed is not None:
        arguments["noise_generator"] = np.random.default_rng(seed)
    with _synthetic_data():
        reports = (
            black_box(
                *(model, *loaders, arguments, canary.score),
                releases=releases,
                subject=f"ExpM-Quad, {releases} releases each",
            ),
            black_box(
                *(model, *loaders, arguments, canary.score),
                releases=draws,
                draws_per_pass=draws,
                subject=f"ExpM-Quad, {draws} draws each",
            ),
            black_box_dp_sgd(
                *(model, *datasets, nn.MSELoss(), canary.dp_sgd_arguments(epsilon, delta), canary.score),
                releases=releases,
                seed=seed,
                subject=f"Opacus DP-SGD, {releases} runs each",
            ),
        )
    return Report(tuple(f for report in reports for f in report.findings))
