"""Privacy curves in closed form: bounded-range mechanisms and Gaussian differential privacy.

Everything here is a function of public numbers. ε is ``epsilon_range``: the length of the interval
that contains the privacy loss of one release, μ is the parameter of Gaussian
differential privacy, ε′ and δ are the two sides of an (ε′, δ) statement.

Sources: the bounded-range curves are those of the two-point laws that dominate every ε-bounded-range
mechanism (Dong, Durfee, Rogers, *Optimal Differential Privacy Composition for Exponential Mechanisms*,
ICML 2020); the Gaussian curve is Dong, Roth, Su, *Gaussian Differential Privacy*, JRSS-B 2022.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import erfinv, log_ndtr, ndtr, ndtri_exp

_STEP_TO_SAFETY = 1e-12  # relative step taken from a numerical root towards more privacy
_MAX_MU = 1e4  # beyond it ε exceeds 5e7 for every useful δ: no statement is made rather than an imprecise one


def bounded_range_delta(epsilon_range: float, epsilon: float) -> float:
    """Least δ at which one ε_range-bounded-range release is (ε′, δ)-DP.

    δ(ε′) = (1 − e^{(ε′−ε)/2})² / (1 − e^{−ε}) for 0 ≤ ε′ ≤ ε, and 0 beyond.

    >>> round(bounded_range_delta(1.0, 0.5), 6)
    0.077405
    """
    if epsilon >= epsilon_range:
        return 0.0
    return math.expm1((epsilon - epsilon_range) / 2) ** 2 / -math.expm1(-epsilon_range)


def bounded_range_epsilon(epsilon_range: float, delta: float) -> float:
    """Least ε′ at which one ε_range-bounded-range release is (ε′, δ)-DP: the inverse of the curve above.

    ε′ = ε + 2 ln(1 − √(δ(1 − e^{−ε}))), and 0 where that is negative.
    """
    root = math.sqrt(delta * -math.expm1(-epsilon_range))
    return max(0.0, epsilon_range + 2 * math.log1p(-root))


def bounded_range_for(epsilon: float, delta: float) -> float:
    """Largest ε_range whose release is (ε′, δ)-DP; equals ε′ at δ = 0.

    With b = e^{−ε′/2}, the curve is a quadratic equation in e^{−ε/2}, whose smaller root is
    b(1 − √(δ(1 − b²(1−δ)))) / (1 + δb²).
    """
    if delta == 0:
        return epsilon
    b_squared = math.exp(-epsilon)
    shrink = math.log1p(-math.sqrt(delta * (1 - b_squared * (1 - delta)))) - math.log1p(delta * b_squared)
    return (epsilon - 2 * shrink) * (1 - _STEP_TO_SAFETY)


def bounded_range_rdp(epsilon_range: float, order: float) -> float:
    """Rényi divergence of the given order of the worst ε_range-bounded-range release.

    With y = (α−1)(1−e^{−αε}) / (α(1−e^{−(α−1)ε})),
    RDP(α) = ε + ln y + [ln(1−e^{−αε}) − ln α − ln(1−e^{−ε})] / (α−1), at most min(ε, αε²/8).

    >>> round(bounded_range_rdp(1.0, 2.0), 6)
    0.240229
    """
    eps, a = epsilon_range, order

    def log_gap(t: float) -> float:  # ln(1 − e^{−t})
        return math.log(-math.expm1(-t))

    log_y = math.log((a - 1) / a) + log_gap(a * eps) - log_gap((a - 1) * eps)
    exact = eps + log_y + (log_gap(a * eps) - math.log(a) - log_gap(eps)) / (a - 1)
    # The closed form cancels for tiny ε: a rounding margin above it, and two bounds that always hold.
    return min(eps, a * eps * eps / 8, exact + 1e-13)


def bounded_range_mu(epsilon_range: float) -> float:
    """Least μ for which every ε_range-bounded-range release is μ-GDP: 2Φ⁻¹(1/(1 + e^{−ε/2})).

    For a pair of neighbours whose privacy loss lies in [t−ε, t], the trade-off function has slopes in [−e^t, −e^{t−ε}] and
    joins (0, 1) to (1, 0), so it is at least the larger of 1 − e^t·α and e^{t−ε}(1−α). The convex curve of two unit
    Gaussians at distance μ is below that for every t if the chords from each of its points (q, 1−p) to (0, 1) and
    (1, 0) have log-slopes that differ by at least ε, that is logit p − logit q ≥ ε. There p = Φ(x+μ), q = Φ(x), and the
    derivative of logit Φ is φ/(Φ(1−Φ)) = h(x) + h(−x) with the normal hazard h, which is convex (Sampford 1953): the
    derivative is even and grows with |x|, so the difference is least at x = −μ/2, where it is 2 logit Φ(μ/2).

    >>> round(bounded_range_mu(1.0), 6)
    0.623893
    """
    if epsilon_range < 1:  # Φ(x) − ½ = ½ erf(x/√2), and 1/(1 + e^{−ε/2}) − ½ = ½ tanh(ε/4), without cancellation
        mu = math.sqrt(8) * float(erfinv(math.tanh(epsilon_range / 4)))
    else:
        mu = -2 * float(ndtri_exp(-epsilon_range / 2 - math.log1p(math.exp(-epsilon_range / 2))))
    return mu * (1 + _STEP_TO_SAFETY)


def bounded_range_within(mu: float) -> float:
    """Largest ε_range whose release is μ-GDP: 2 logit Φ(μ/2), the inverse of ``bounded_range_mu``."""
    if mu < 1:  # the same without cancellation
        epsilon_range = 4 * math.atanh(math.erf(mu / math.sqrt(8)))
    else:
        epsilon_range = 2 * float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))
    return epsilon_range * (1 - _STEP_TO_SAFETY)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Least δ at which a μ-GDP release is (ε, δ)-DP.

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2).
    """
    if mu == 0:
        return 0.0
    upper = float(ndtr(-epsilon / mu + mu / 2))
    return max(0.0, upper - math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Least ε at which a μ-GDP release is (ε, δ)-DP, on the private side of the root; ∞ at δ = 0."""
    if delta == 0 or mu > _MAX_MU:
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    root = float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, high, xtol=1e-17, rtol=1e-14))
    step = _STEP_TO_SAFETY
    while gaussian_delta(mu, root) > delta:
        root, step = root + step * max(root, 1e-6), 2 * step
    return root


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest μ whose release is (ε, δ)-DP, on the private side of the root; 0 at δ = 0.

    >>> round(gaussian_mu(1.0, 1e-5), 6)
    0.268051
    """
    if delta == 0:
        return 0.0
    high = 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    low = high
    while gaussian_delta(low, epsilon) > delta:
        low /= 2
    root = float(brentq(lambda m: gaussian_delta(m, epsilon) - delta, low, high, xtol=1e-15, rtol=1e-14))
    while gaussian_epsilon(root, delta) > epsilon:
        root *= 1 - _STEP_TO_SAFETY
    return root
