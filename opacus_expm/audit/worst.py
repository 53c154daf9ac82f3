"""The worst neighbours that the clipping bounds allow, found by search, and the exact audit of the engine on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.optimize import minimize

from opacus_expm.audit.exact import DRAWS, audit_pair
from opacus_expm.audit.findings import Finding, Report, synthetic_data
from opacus_expm.audit.pairs import Pair, Record, Setting
from opacus_expm.mechanism.calibration import calibrate
from opacus_expm.mechanism.density import Array
from opacus_expm.mechanism.privacy_loss import Quadrature

_PULLS = (1, 30, 1000)  # records in the base that pull in one direction
_ANGLES = [i * math.pi / 8 for i in range(8)]


def worst_pair(setting: Setting) -> Pair:
    """Search for the neighbours that reveal the most: the worst record within the bounds, on the worst base.

    The search tries all combinations of a gradient at several angles to the base's pull with curvature of rank 0, 1 (at
    several angles) and k. The bases are soft or stiff, and up to a thousand of their records pull in one direction. For
    replace-one, a record with the opposite gradient and any kind of curvature takes the place of the first.

    For δ = 0 the exact largest loss decides, and the angles of the best pair are refined. For δ > 0 the δ that quadrature
    finds at the claimed ε decides. Everything then lies on one line, where gradients and curvatures add up, and in k
    dimensions this line is the first axis.
    """
    on_line = setting.delta > 0 or setting.proj_dim == 1
    calibrated = calibrate(
        setting.sensitivity(),
        epsilon=setting.epsilon,
        delta=setting.delta,
        radius=setting.radius,
        regularization=setting.regularization,
        nominal_size=setting.nominal_size,
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
    """The pairs that ``worst_pair`` tries first, in a plane or on a line."""
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
    """Directions of the base's pull; the record's gradient points along the first axis."""
    return [a + turn for turn in (0.0, math.pi) for a in _ANGLES[::2]] if plane else [0.0, math.pi]


def audit_worst(setting: Setting, *, draws: int = DRAWS, seed: int = 0) -> Report:
    """Search for the worst pair, make data of it, and audit the whole engine on them.

    The finding from draws is for the worst pair's records on a base without a pull.

    **Privacy:** synthetic data only.
    """
    pair = worst_pair(setting)
    options: dict[str, Any] = {"subject": f"k={setting.proj_dim}", "draws": draws, "seed": seed}
    with synthetic_data():
        findings = audit_pair(*pair.data(), setting.arguments(), **options).findings
        if setting.delta == 0 and pair.pull > 0:
            # No draw comes near the worst point of a base that pulls hard: the same records without the pull show more.
            calm = audit_pair(*dataclasses.replace(pair, pull=0).data(), setting.arguments(), **options).findings
            findings = (*findings[:-1], calm[-1])
    return Report(findings)


def audit_exact(epsilon: float = 1.0, delta: float = 1e-5, *, seed: int = 0) -> Report:
    """Audit the worst pairs of both calibrations under both adjacencies, in two dimensions, and of ``range`` in twenty.

    **Privacy:** synthetic data only.
    """
    found: list[Finding] = []
    for adjacency in ("add_remove", "replace_one"):
        base = Setting(epsilon, adjacency=adjacency)
        settings = {
            "range, k=2": base,
            "gaussian, k=2": dataclasses.replace(base, delta=delta, regularization=10.0),
            "range, k=20": dataclasses.replace(base, proj_dim=20),
        }
        for subject, setting in settings.items():
            findings = audit_worst(setting, seed=seed).findings
            found.extend(dataclasses.replace(f, subject=subject) for f in findings)
    return Report(tuple(found))
