"""The source paper's six figures, each drawn twice: with the paper's calibration and sampler, and with ours.

| | ``"paper_not_private"`` | ``"ours"`` |
|---|---|---|
| bounds | largest Jacobian and residual of the private data, times 1.1 | quantiles of projected norms on public data |
| calibration | c = ε/(2ΔU) with the full-space bounds [eq:sens_MS, eq:sens_CE] | ``range``: c = ε/W, in the subspace |
| sampler | Gibbs | exact |
| guarantee of one candidate | none: the bounds are read off the private data | ε-DP, add/remove |

Both use the paper's k, R and ridge λ and the same subspaces, with one pass for each: every ε and radius is drawn from its
sums. A point of a curve is the mean over many simulated candidates.

**Privacy:** this is an experiment, not a release. All candidates of a curve come from the same statistics and together
are private to no useful degree, with either calibration; DP-SGD is tuned on private records without charge. Run it on data
on which that is allowed.

    python -m benchmarks.reproduction sine icu mnist [--quick] [--out DIRECTORY]
"""
