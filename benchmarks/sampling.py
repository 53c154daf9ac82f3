"""Draws per second of the samplers, and what 500 draws cost beside one statistics pass.

    python -m benchmarks.sampling [--records 20000] [--out sampling.json]

Every figure of a regime is measured in this one run; Gibbs draws are weighed by their effective number.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import timing
from opacus_expm import ExpMQuadEngine, tasks
from opacus_expm.mechanism import sampling
from opacus_expm.mechanism.density import BallGaussian
from opacus_expm.paper import Gibbs, PlainRejection

REGIMES = ("inside", "flat", "moderate", "sharp")
DRAWS = 500
GIBBS_SWEEPS = 200


def density(k: int, regime: str) -> BallGaussian:
    """A density in one of four regimes, in the unit ball."""
    random = np.random.default_rng(0)
    w = random.uniform(0, 1, k)
    b = random.standard_normal(k)
    b /= np.linalg.norm(b)
    return {
        "inside": BallGaussian(4 * k * (1 + w), k * b, 1.0),
        "flat": BallGaussian(0.1 * w, b, 1.0),
        "moderate": BallGaussian(k * w, 10 * k * b, 1.0),
        "sharp": BallGaussian(k * w, 1e5 * b, 1.0),
    }[regime]


def tilted_alone(case: BallGaussian, generator: np.random.Generator) -> float:
    """Seconds for one draw with the tilted proposal alone, from its acceptance over a bounded number of proposals."""
    proposal = sampling._Tilted(case)
    rows = max(256, 2**18 // case.dim)
    start, accepted = time.perf_counter(), 0
    for _ in range(400):
        accepted += len(proposal.accepted(generator, rows))
        if accepted >= 50:
            break
    return (time.perf_counter() - start) / max(accepted, 1)


def effective_fraction(series: np.ndarray) -> float:
    """Effective draws per sweep of parallel chains (chains, sweeps), by Geyer's initial positive sequence."""
    centred = series - series.mean()
    variance = (centred**2).mean()
    total = 1.0
    for lag in range(1, series.shape[1] - 1, 2):
        pair = sum((centred[:, :-s] * centred[:, s:]).mean() / variance for s in (lag, lag + 1))
        if pair <= 0:
            break
        total += 2 * pair
    return 1 / total


def gibbs_rate(case: BallGaussian, generator: np.random.Generator) -> tuple[float, float]:
    """Sweeps per second of 8 chains together, and effective draws per sweep (the worse of |ξ|² and bᵀξ)."""
    sampler = Gibbs(burn_in=GIBBS_SWEEPS // 4, thin=1, chains=8)
    start = time.perf_counter()
    draws = sampler.sample(case, generator, 8 * GIBBS_SWEEPS)
    elapsed = (time.perf_counter() - start) * GIBBS_SWEEPS / (1.25 * GIBBS_SWEEPS)
    series = draws.reshape(8, GIBBS_SWEEPS, case.dim)
    worst = min(effective_fraction((series**2).sum(2)), effective_fraction(series @ case.linear))
    return 8 * GIBBS_SWEEPS / elapsed, worst


def rejection_rate(case: BallGaussian, generator: np.random.Generator) -> float:
    """Draws per second of plain rejection, 0 where it gives up."""
    try:
        PlainRejection(max_proposals=20_000).sample(case, generator, 1)
        return DRAWS / timing.median_seconds(lambda: PlainRejection().sample(case, generator, DRAWS))
    except RuntimeError:
        return 0.0


def pass_seconds(records: int) -> float:
    """One exact statistics pass of the paper's CNN at k = 400 on random images."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(records, 1, 28, 28), torch.randint(10, (records,)))
    start = time.perf_counter()
    ExpMQuadEngine().gather(
        tasks.cnn(), DataLoader(data, batch_size=512), 400, max_grad_norm=1.0, max_curvature=1.0,
        criterion=torch.nn.CrossEntropyLoss(), projection="sparse",
    )  # fmt: skip
    return time.perf_counter() - start


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=20_000, help="records of the statistics pass")
    parser.add_argument("--out", help="JSON file for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    generator = np.random.default_rng(1)
    one_pass = pass_seconds(options.records)
    print(f"one statistics pass, {options.records} records, k = 400, sparse: {one_pass:.1f} s")
    print(f"{'k':>5} {'regime':9} {'exact/s':>9} {'tilted/s':>9} {'reject/s':>9} {'gibbs eff/s':>12} "
          f"{'exact:tilted':>12} {'exact:gibbs':>12} {'500 draws':>10} {'of a pass':>9}")  # fmt: skip
    rows = []
    for k in (20, 100, 400, 1600):
        for regime in REGIMES:
            case = density(k, regime)
            seconds = timing.median_seconds(lambda case=case: sampling.Exact().sample(case, generator, DRAWS))
            tilted = 1 / tilted_alone(case, generator)
            sweeps, effective = gibbs_rate(case, generator)
            row = {
                "k": k, "regime": regime, "exact": DRAWS / seconds, "tilted": tilted,
                "rejection": rejection_rate(case, generator), "gibbs_effective": sweeps * effective,
                "seconds_500": seconds, "fraction_of_pass": seconds / one_pass,
            }  # fmt: skip
            rows.append(row)
            print(f"{k:5d} {regime:9} {row['exact']:9.0f} {tilted:9.0f} {row['rejection']:9.0f} "
                  f"{row['gibbs_effective']:12.1f} {row['exact'] / tilted:12.1f} "
                  f"{row['exact'] / row['gibbs_effective']:12.1f} {seconds:9.3f}s {row['fraction_of_pass']:9.2%}",
                  flush=True)  # fmt: skip
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"pass_seconds": one_pass, "records": options.records, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
