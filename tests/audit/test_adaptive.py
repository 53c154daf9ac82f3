"""Learned rounds, audited part after part: the claim holds, and every defect breaks it."""

import copy
import math

import numpy as np
import pytest
import torch

from opacus_expm import audit, geometry, learned
from opacus_expm.audit import adaptive, told
from opacus_expm.audit.adaptive import JointLaw
from opacus_expm.learned import Walk
from opacus_expm.mechanism import curves
from opacus_expm.questions import Questions

DELTAS = (1e-5, 1e-3, 1e-2)
NONE = np.zeros(1)


def _findings(make, epsilon=1.0, deltas=DELTAS):
    return make(epsilon, 1e-5).findings(deltas)


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_a_normal_part_alone_has_the_gaussian_curve(mu, delta):
    law = JointLaw(NONE, NONE, np.array([mu]))
    assert law.epsilon(delta) == pytest.approx(curves.gaussian_epsilon(mu, delta), abs=1e-5)


def test_histories_alone_have_the_curve_of_their_probabilities():
    p, q = np.log([0.7, 0.2, 0.1]), np.log([0.3, 0.3, 0.4])
    law = JointLaw(p, q, np.zeros(3))
    assert law.delta(0.0) == pytest.approx(0.4)
    assert law.delta(0.5) == pytest.approx(max(0.7 - math.exp(0.5) * 0.3, 0.4 - math.exp(0.5) * 0.1))
    assert law.epsilon(1e-9) == pytest.approx(math.log(4), abs=1e-5)


def test_a_history_and_a_normal_part_agree_with_quadrature_over_both():
    p, q, d = np.log([0.6, 0.4]), np.log([0.5, 0.5]), np.array([0.8, 0.3])
    z = np.arange(-10, 10, 1e-3)
    both = [
        (np.exp(v)[:, None] * np.exp(-((z - shift) ** 2) / 2) / math.sqrt(2 * math.pi) * 1e-3).ravel()
        for v, shift in ((p, np.zeros((2, 1))), (q, d[:, None]))
    ]
    for epsilon in (0.0, 0.3, 1.0):
        slow = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in (both, both[::-1]))
        assert JointLaw(p, q, d).delta(epsilon) == pytest.approx(slow, abs=1e-7)


def test_what_only_one_data_set_can_release_has_no_epsilon():
    law = JointLaw(np.log([0.5, 0.5]), np.array([0.0, -math.inf]), np.array([1.0, 1.0]))
    assert law.epsilon(0.4) == math.inf
    assert law.epsilon(0.6) < math.inf
    assert JointLaw(NONE, NONE, np.zeros(1)).epsilon(1e-5) == 0.0


# --- the claim -------------------------------------------------------------------------------------------------------

# What is found over what is claimed, at least, at the δ of the plan.
TIGHT = {
    adaptive.metric: 0.9,
    adaptive.two_directions: 0.99,
    adaptive.direction_and_choice: 0.75,
    adaptive.bound_and_loss: 0.9,
    adaptive.bound_and_direction: 0.75,
}
LONG = (adaptive.bound_and_direction,)


@pytest.mark.parametrize(
    "make", [pytest.param(m, marks=pytest.mark.slow if m in LONG else ()) for m in TIGHT], ids=lambda m: m.__name__
)
def test_parts_reveal_no_more_than_the_ledger_states(make):
    findings = _findings(make)
    assert all(f.holds for f in findings), audit.Report(findings).table()
    assert findings[0].ratio > TIGHT[make]
    assert findings[0].claimed <= 1.0
    assert [f.delta for f in findings] == list(DELTAS)


@pytest.mark.slow
def test_more_nodes_change_nothing(monkeypatch):
    for make, tolerance in ((adaptive.two_directions, 3e-4), (adaptive.direction_and_choice, 1e-3)):
        found = _findings(make)
        with monkeypatch.context() as patch:
            patch.setattr(adaptive, "_STEP", adaptive._STEP / 1.7)
            patch.setattr(adaptive, "_FINE", adaptive._FINE / 1.7)
            again = _findings(make)
        assert [f.found for f in again] == pytest.approx([f.found for f in found], abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 4.0])
def test_other_budgets(epsilon):
    for make in (adaptive.metric, adaptive.two_directions if epsilon > 1 else adaptive.direction_and_choice):
        findings = _findings(make, epsilon, (1e-5, 1e-3))
        assert all(f.holds for f in findings), audit.Report(findings).table()


# --- defects ---------------------------------------------------------------------------------------------------------


def _half_of_the_symmetric_noise(patch):
    right = geometry.symmetric_noise
    patch.setattr(geometry, "symmetric_noise", lambda *a: right(*a) / 2)


def _noise_of_directions(factor):
    def put(patch):
        right = Walk.advance

        def wrong(self, total):
            rule = self.rule
            self.rule = copy.copy(rule)
            self.rule.__dict__["noise_multiplier"] = factor * rule.noise_multiplier
            try:
                right(self, total)
            finally:
                self.rule = rule

        patch.setattr(Walk, "advance", wrong)

    return put


def _gradients_clipped_at_more(patch):
    patch.setattr(learned, "_MARGIN", 1.1)


def _more_records_in_a_sample(patch):
    right = told.sampled
    patch.setattr(told, "sampled", lambda loader, rate, random: right(loader, min(1.0, 1.2 * rate), random))


def _bounds_off_the_data(patch):
    patch.setattr(Questions, "quantile", lambda _, what, norms, quantile, *more: float(np.quantile(norms, quantile)))


def _unclipped(patch):
    patch.setattr(torch.Tensor, "clamp", lambda self, *_, **__: self)


def _half_of_the_noise_of_the_loss(patch):
    right = Questions.ask

    def wrong(self, what, draw, like, **costs):
        if what == "loss":
            noise = self.books.noise.source()
            noise.normals = type(noise.normals)(v / 2 for v in noise.normals)
        return right(self, what, draw, like, **costs)

    patch.setattr(Questions, "ask", wrong)


def _half_of_the_width_of_the_choice(patch):
    right = Questions.choice

    def wrong(self, what, logits, epsilon):
        return right(self, what, 2 * logits - learned._RELUCTANCE, epsilon)

    patch.setattr(Questions, "choice", wrong)


DEFECTS = [
    (adaptive.metric, _half_of_the_symmetric_noise),
    (adaptive.metric, _bounds_off_the_data),
    (adaptive.bound_and_direction, _bounds_off_the_data),
    (adaptive.two_directions, _noise_of_directions(0.98)),
    (adaptive.direction_and_choice, _half_of_the_width_of_the_choice),
    (adaptive.bound_and_loss, _bounds_off_the_data),
    (adaptive.bound_and_loss, _unclipped),
    (adaptive.bound_and_loss, _half_of_the_noise_of_the_loss),
]
LONG_DEFECTS = [
    (adaptive.two_directions, _noise_of_directions(0.5)),
    (adaptive.two_directions, _gradients_clipped_at_more),
    (adaptive.two_directions, _more_records_in_a_sample),
]


@pytest.mark.parametrize(
    ("make", "put"), [*DEFECTS, *(pytest.param(*defect, marks=pytest.mark.slow) for defect in LONG_DEFECTS)]
)
def test_defects_would_be_noticed(make, put, monkeypatch):
    put(monkeypatch)
    (finding,) = _findings(make, deltas=(1e-5,))
    assert finding.found > 1.01 * finding.claimed
