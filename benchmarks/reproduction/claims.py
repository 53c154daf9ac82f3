"""What the source paper says of its figures, judged by ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from benchmarks.reproduction.results import Curve, Reference, Reproduction
from benchmarks.reproduction.settings import EPSILONS, FIGURES, METHODS, MODERATE, RADII
from opacus_expm.experiments.journal import write_result

_LARGE = 5.0  # the ε from which the paper compares dimensions
_CLOSED = 0.8  # share of the way from zero-shot to non-private that "approaches" asks for
_COMPETITIVE = 0.5  # and "competitive"
_FLAT = 0.1  # and what is no more than flat
_SLACK = 0.01  # of that way: what is no decrease, and no gain
_NEAR = 3.0  # factor within which an ε is near another


@dataclass(frozen=True)
class Finding:
    """Whether a claim of the paper was found again: ``"yes"``, ``"no"``, or ``"better"`` where it is surpassed."""

    verdict: str
    found: str


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what came of it by method.

    Attributes:
        title: the statement in short, the same for every task.
        statement: with the task's numbers, and how it is judged.
        findings: by method.
    """

    title: str
    statement: str
    findings: Mapping[str, Finding]


def claims(found: Reproduction) -> tuple[Claim, ...]:
    """The statements of the paper that apply to the task, judged by its curves; how is in each statement."""
    setting = found.setting
    judged: list[tuple[str, str, Callable[[Reproduction, str], Finding]]] = [
        ("a moderate R is best", "a moderate R (0.1, 0.15) is best, on average over ε ≥ 1", _moderate_is_best),
        (
            "larger k is better",
            f"larger k is better (each of the larger half above each of the smaller, ε ≥ {_LARGE:g})",
            _larger_is_better,
        ),
        ("the mean improves with ε", "the mean improves with ε in every curve", _monotone),
        (
            "it beats zero-shot from about the ε said",
            f"with a moderate R it beats zero-shot from ε near {setting.crossing:g} on (factor {_NEAR:g})",
            _crossing,
        ),
        (
            "it approaches non-private training",
            f"with a moderate R it approaches non-private training at ε = {EPSILONS[-1]:g} ({_CLOSED:.0%} of the gap)",
            _approaches,
        ),
        (
            "DP-SGD is flat (at the paper's rate / tuned)",
            f"DP-SGD is flat from ε = {setting.flat_from:g} on (changes below {_FLAT:.0%} of the gap)",
            _flat,
        ),
        ("it overtakes tuned DP-SGD", "with a moderate R it overtakes DP-SGD (tuned) at the largest ε", _overtakes),
        ("many candidates from one pass", f"{found.draws} candidates come from one pass", _one_pass),
    ]
    if setting.enough is not None:
        text = f"beyond k = {setting.enough} little is gained (below {_FLAT:.0%} of the gap)"
        judged.insert(2, ("a small k is enough", text, _enough_is_enough))
    if any(c.loss != found.loss for c in found.curves):
        text = f"cross-entropy is not competitive (below {_COMPETITIVE:.0%} of its gap at ε ≤ 10)"
        judged.insert(-1, ("cross-entropy is not competitive", text, _cross_entropy))
    return tuple(Claim(title, text, {m: judge(found, m) for m in METHODS}) for title, text, judge in judged)


def table(found: Reproduction) -> str:
    """The claims in Markdown, and the conditions they hold under."""
    head = ["the paper says", *(f"{label}{'' if m == 'ours' else ' (not private)'}" for m, label in METHODS.items())]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|"]
    for claim in claims(found):
        cells = [f"**{claim.findings[m].verdict}**: {claim.findings[m].found}" for m in METHODS]
        lines.append(f"| {' | '.join([claim.statement, *cells])} |")
    return "\n".join([*lines, "", *_conditions(found)])


def _conditions(found: Reproduction) -> list[str]:
    """What the numbers mean."""
    stated = sorted({e for c in found.curves if c.method == "ours" for e in c.stated if e is not None})
    return [
        f"{found.task}{' (quick run)' if found.quick else ''}: {found.records} private records, p = {found.parameters}; "
        f"means over {found.draws} simulated candidates, on {found.test_records} test records; seed {found.seed}.",
        "A SIMULATION: the candidates of a curve come from the same statistics and are not private together.",
        "The paper's bounds are read off the private data: NOT differentially private at any ε; the ledger refuses to "
        "state one.",
        "Ours has the same k, R and λ, and takes its bounds from the public data; for one candidate the ledger states "
        + "ε = "
        + ", ".join(f"{e:g}" for e in stated)
        + f", as asked. DP-SGD has δ = {found.delta:g}.",
    ]


def summary(found: Sequence[Reproduction]) -> str:
    """The verdicts of several tasks in one Markdown table: the paper's calibration first, then ours."""
    rows: dict[str, dict[str, str]] = {}
    for one in found:
        for claim in claims(one):
            verdicts = " / ".join(claim.findings[m].verdict for m in METHODS)
            rows.setdefault(claim.title, {})[one.task] = verdicts
    names = [one.task for one in found]
    lines = [f"| the paper says | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines += [f"| {title} | {' | '.join(cells.get(n, '–') for n in names)} |" for title, cells in rows.items()]
    return "\n".join(lines)


def to_json(found: Reproduction, path: str | PathLike[str]) -> None:
    """Write everything, the claims included; ``Reproduction.from_json`` reads it."""
    write_result(path, {**dataclasses.asdict(found), "claims": [dataclasses.asdict(c) for c in claims(found)]})


def _merit(found: Reproduction, value: float) -> float:
    """Larger is better."""
    return value if found.metric == "accuracy" else -value


def _number(found: Reproduction, value: float) -> str:
    """A value of the metric for people."""
    return f"{value:.1f} %" if found.metric == "accuracy" else f"{value:.4f}"


def _gap(found: Reproduction, loss: str | None = None) -> float:
    """The way from zero-shot to non-private."""
    ends = (found.reference(m, loss).means[0] for m in ("non-private", "zero-shot"))
    best, start = (_merit(found, value) for value in ends)
    return best - start


def _share(found: Reproduction, value: float, loss: str | None = None) -> float:
    """The part of that way that a value has gone; NaN where there is no way to go."""
    gap = _gap(found, loss)
    gone = _merit(found, value) - _merit(found, found.reference("zero-shot", loss).means[0])
    return gone / gap if gap > 0 else math.nan


def _average(curve: Curve, least: float) -> float:
    """The mean of a curve's means from an ε on."""
    return float(np.mean([m for e, m in zip(curve.epsilons, curve.means, strict=True) if e >= least]))


def _at(line: Curve | Reference, epsilon: float) -> float:
    """The mean at an ε."""
    return line.means[line.epsilons.index(epsilon)]


def _verdict(held: bool) -> str:
    return "yes" if held else "no"


def _best_radius(found: Reproduction, method: str, radii: Sequence[float] = RADII) -> Curve:
    """The curve of the first figure that is best on average over ε ≥ 1."""
    curves = [c for c in found.figure("radius", method) if c.radius in radii]
    return max(curves, key=lambda c: _merit(found, _average(c, 1.0)))


def _moderate_is_best(found: Reproduction, method: str) -> Finding:
    curves = found.figure("radius", method)
    best = _best_radius(found, method)
    last = max(curves, key=lambda c: _merit(found, c.means[-1]))
    averages = ", ".join(f"{c.radius:g}: {_number(found, _average(c, 1.0))}" for c in curves)
    return Finding(
        _verdict(best.radius in MODERATE),
        f"R = {best.radius:g} is ({averages}); at ε = {last.epsilons[-1]:g} it is R = {last.radius:g}",
    )


def _larger_is_better(found: Reproduction, method: str) -> Finding:
    averages = {c.proj_dim: _average(c, _LARGE) for c in found.figure("dimension", method)}
    merits = [_merit(found, value) for value in averages.values()]
    half = len(merits) // 2
    text = ", ".join(f"k = {k}: {_number(found, value)}" for k, value in averages.items())
    return Finding(_verdict(min(merits[half:]) > max(merits[:half])), text)


def _enough_is_enough(found: Reproduction, method: str) -> Finding:
    curves = {c.proj_dim: c for c in found.figure("dimension", method)}
    enough, most = found.setting.enough, max(curves)
    assert enough is not None
    more, less = (_share(found, _average(curves[k], _LARGE)) for k in (most, enough))
    return Finding(_verdict(more - less < _FLAT), f"k = {most} gains {more - less:+.0%} of the gap over k = {enough}")


def _monotone(found: Reproduction, method: str) -> Finding:
    curves = {(c.proj_dim, c.radius): c for kind in FIGURES for c in found.figure(kind, method)}
    falls = []
    for curve in curves.values():
        for i in range(len(curve.means) - 1):
            error = 2 * math.hypot(curve.stds[i], curve.stds[i + 1]) / math.sqrt(found.draws)
            fall = _merit(found, curve.means[i]) - _merit(found, curve.means[i + 1])
            if not fall <= max(error, _SLACK * abs(_gap(found))):
                steps = f"ε {curve.epsilons[i]:g} → {curve.epsilons[i + 1]:g}"
                falls.append(f"k = {curve.proj_dim}, R = {curve.radius:g} ({steps})")
                break
    text = f"{len(curves) - len(falls)} of {len(curves)} curves" + (f"; not {', '.join(falls)}" if falls else "")
    return Finding(_verdict(not falls), text)


def _crossing(found: Reproduction, method: str) -> Finding:
    curve = _best_radius(found, method, MODERATE)
    above = [e for e, m in zip(curve.epsilons, curve.means, strict=True) if _share(found, m) > _SLACK]
    if not above:
        return Finding("no", f"nowhere (R = {curve.radius:g})")
    first, claimed = above[0], found.setting.crossing
    missed = [e for e in curve.epsilons if e > first and e not in above]
    text = f"from ε = {first:g} (R = {curve.radius:g})" + (
        f", but not at {', '.join(map('{:g}'.format, missed))}" if missed else ""
    )
    if missed or first > _NEAR * claimed:
        return Finding("no", text)
    return Finding("better" if first < claimed / _NEAR else "yes", text)


def _approaches(found: Reproduction, method: str) -> Finding:
    curve, best = _best_radius(found, method, MODERATE), _best_radius(found, method)
    share = _share(found, curve.means[-1])
    ends = " and ".join(_number(found, found.reference(m).means[0]) for m in ("zero-shot", "non-private"))
    text = f"{share:.0%} of the gap: {_number(found, curve.means[-1])} (R = {curve.radius:g}), between {ends}"
    if best is not curve:
        text += f"; {_share(found, best.means[-1]):.0%} at R = {best.radius:g}"
    return Finding(_verdict(share >= _CLOSED), text)


def _flat(found: Reproduction, method: str) -> Finding:
    name, label = ("dp-sgd", "tuned") if method == "ours" else ("dp-sgd-paper-rate", "at the paper's learning rate")
    line = found.reference(name)
    shares = [_share(found, m) for e, m in zip(line.epsilons, line.means, strict=True) if e >= found.setting.flat_from]
    text = f"DP-SGD {label}: {shares[0]:.0%} of the gap at ε = {found.setting.flat_from:g}, {shares[-1]:.0%} at the end"
    return Finding(_verdict(max(shares) - min(shares) < _FLAT), text)


def _overtakes(found: Reproduction, method: str) -> Finding:
    curve, best, line = _best_radius(found, method, MODERATE), _best_radius(found, method), found.reference("dp-sgd")

    def ahead(own: Curve) -> list[float]:
        pairs = zip(own.epsilons, own.means, strict=True)
        return [e for e, m in pairs if _merit(found, m) > _merit(found, _at(line, e))]

    def listed(own: Curve) -> str:
        return f"ahead at {'ε = ' + ', '.join(f'{e:g}' for e in ahead(own)) if ahead(own) else 'no ε'} (R = {own.radius:g})"

    text = f"{_number(found, curve.means[-1])} against {_number(found, line.means[-1])}; {listed(curve)}"
    if best is not curve:
        text += f", {listed(best)}"
    return Finding(_verdict(curve.epsilons[-1] in ahead(curve)), text)


def _cross_entropy(found: Reproduction, method: str) -> Finding:
    curve = next(c for c in found.curves if c.loss != found.loss and c.method == method)
    reached = [m for e, m in zip(curve.epsilons, curve.means, strict=True) if e <= 10]
    best = max(reached, key=lambda m: _merit(found, m))
    share = _share(found, best, curve.loss)
    ends = (_number(found, found.reference(m, curve.loss).means[0]) for m in ("zero-shot", "non-private"))
    text = f"at best {share:.0%} of its gap: {_number(found, best)}, between {' and '.join(ends)}"
    return Finding("yes" if share < _COMPETITIVE else "better", text)


def _one_pass(found: Reproduction, method: str) -> Finding:
    passes = len({(c.loss, c.proj_dim) for c in found.curves if c.method == method})
    points = sum(len(c.epsilons) for c in found.curves if c.method == method)
    text = (
        f"{passes} passes, one for each subspace, gave {points * found.draws:,} candidates at {points} pairs of ε and R"
    )
    return Finding(_verdict(points > passes and found.draws > 1), text)
