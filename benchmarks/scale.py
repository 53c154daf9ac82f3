"""How time and memory grow with records, the ranks that share a pass, the parameters p and the subspace dimensions k.

    python -m benchmarks.scale [records ranks parameters dimensions estimate] --log scale.jsonl [--out scale.json]

Each measurement runs in a process of its own, with one thread, is appended to the log as one line and not made again.
Times are CPU seconds, memory is the peak resident set above that of the imports.

* ``records``: parts of a round over 1,024 to 16,384 random images with the source paper's CNN (6,722 parameters, k = 400,
  sparse projection): CPU seconds by n, and a line through them, with standard errors.
* ``ranks``: one pass over such images with the same CNN, by one process and by two: the same records (strong scaling), and
  the same records a rank (weak scaling).
* ``parameters``: passes of the engine over random records, for a residual perceptron of four square layers and 10
  outputs, sparse and structured projection, k = 400: exact curvature (9 rows a record) and gradients alone (1 row), beside
  the network's own forward and backward passes.
* ``dimensions``: k from 100 to 4,000 for 100,000 parameters: the pass with exact curvature, the eigendecomposition, a draw.
* ``estimate``: a paper estimate for 10⁹ records and 10⁹ parameters from unit costs of the two tables.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from benchmarks import timing
from benchmarks.timing import Timings, cpu_seconds, peak_mb
from opacus_expm.experiments.journal import Journal

RANK_RECORDS, RANK_REPEATS, RANK_BATCH = 2048, 3, 128
RANK_JOBS = {  # ranks and records
    "1 rank": (1, RANK_RECORDS),
    "2 ranks, strong": (2, RANK_RECORDS),
    "2 ranks, weak": (2, 2 * RANK_RECORDS),
}
GROWING, SIZES, SIZE_REPEATS = ("direction", "metric", "exact"), (1024, 2048, 4096, 8192, 16384), 2
OUTPUTS = 10
BATCH = 32
WIDTHS = {100_000: 157, 1_000_000: 499, 10_000_000: 1580, 20_000_000: 2235}  # by the number of parameters
WAYS, ROWS = ("network", "sparse", "structured"), (OUTPUTS - 1, 1)
RECORDS, LEAST_BATCHES, LEAST_ERROR, MOST_SECONDS = 8192, 6, 0.01, 40.0
DIM = 400
DIMS = (100, 400, 1000, 2000, 4000)
DIM_PARAMETERS, DIM_RECORDS = 100_000, 512
ESTIMATE = {"records": 1e9, "parameters": 1e9, "dims": (1000, 4000)}


def records(part: str, count: int) -> dict:
    """CPU seconds of a part of a round over so many records."""
    from benchmarks.passes import Problem, action

    run = action(Problem("digits", count), "exact sparse 400" if part == "exact" else part)
    return {"cpu": cpu_seconds(run)[1]}


def ranks(count: int, records: int) -> dict:
    """A pass that several processes share: the slowest rank's figures."""
    with tempfile.TemporaryDirectory() as directory:
        job = [
            timing.start(
                __spec__.name, "--log", directory, "--one", f"shared {rank} {count} {records}", one_thread=True
            )
            for rank in range(count)
        ]
        reports = [timing.report(process) for process in job]
    return {name: max(report[name] for report in reports) for name in reports[0]}


def shared(rank: int, count: int, records: int, *, directory: str) -> dict:
    """One rank's share of a pass: seconds, CPU seconds, and seconds in which sums were added up."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from opacus_expm import tasks
    from opacus_expm.gathering.ranks import Ranks

    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=count)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(records, 1, 28, 28), torch.randint(OUTPUTS, (records,)))
    model, loader, empty = tasks.cnn(), DataLoader(dataset, batch_size=RANK_BATCH), peak_mb()
    add_up, exchanged = Ranks.summed, 0.0

    def timed(self, values):
        nonlocal exchanged
        self.ready()  # waiting for the other rank's pass is no exchange
        begin = time.perf_counter()
        found = add_up(self, values)
        exchanged += time.perf_counter() - begin
        return found

    Ranks.summed = timed
    (_, cpu), seconds = timing.seconds(lambda: cpu_seconds(lambda: gather(model, loader, DIM)))
    if count > 1:
        dist.barrier()  # a rank that is gone too early ends the other's threads
        dist.destroy_process_group()
    return {"seconds": seconds, "cpu": cpu, "exchange": exchanged, "mb": peak_mb() - empty}


def perceptron(parameters: int, records: int):
    """A residual perceptron of about that many parameters, and random records for it."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Residual(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return x + torch.relu(self.linear(x))

    torch.manual_seed(0)
    width = WIDTHS[parameters]
    model = nn.Sequential(*[Residual(width) for _ in range(4)], nn.Linear(width, OUTPUTS))
    data = TensorDataset(torch.randn(records, width), torch.randint(OUTPUTS, (records,)))
    return model, DataLoader(data, batch_size=BATCH)


def gather(model, loader, dim: int):
    """One pass of the engine, with the sparse projection."""
    import torch

    from opacus_expm import ExpMQuadEngine

    return ExpMQuadEngine().gather(
        model, loader, dim, criterion=torch.nn.CrossEntropyLoss(), projection=recipe_of("sparse"),
        grad_sample_mode="hooks", progress=False, max_grad_norm=1.0, max_curvature=1.0,
    )  # fmt: skip


def parameters(size: int, way: str, rows: int) -> dict:
    """CPU seconds of a record, with a standard error, for the network by itself or for a pass with a projection.

    Batches are timed one by one after the first, until the error is small or there are enough of them.
    """
    model, loader = perceptron(size, RECORDS)
    empty = peak_mb()
    ready = (lambda: network(model, loader, rows)) if way == "network" else lambda: a_pass(model, loader, way, rows)
    batches, once = cpu_seconds(ready)
    next(batches)
    ticks: list[float] = []
    for _ in batches:
        ticks.append(time.process_time())
        each = np.diff(ticks) / BATCH
        error = each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else np.inf
        settled = error < LEAST_ERROR * each.mean() or ticks[-1] - ticks[0] > MOST_SECONDS
        if len(each) >= LEAST_BATCHES and settled:
            break
    return {
        "p": sum(p.numel() for p in model.parameters()), "per_record": each.mean(), "batches": len(each),
        "error": error, "once": once, "mb": peak_mb() - empty,
    }  # fmt: skip


def network(model, loader, rows: int):
    """A forward pass and so many backward passes for each batch, as plain PyTorch has them."""
    import torch

    trainable = list(model.parameters())
    return (
        [torch.autograd.grad(outputs[:, i].sum(), trainable, retain_graph=i + 1 < rows) for i in range(rows)]
        for outputs in (model(inputs) for inputs, _ in loader)
    )


def a_pass(model, loader, projection: str, rows: int):
    """A pass of the engine, batch by batch, once all is ready that is paid once: copies, the map, the check of the hooks."""
    import torch

    from opacus_expm import GradSampling
    from opacus_expm.gathering import looks
    from opacus_expm.gathering.clipping import ClippingBounds
    from opacus_expm.gathering.measurement import Measurement
    from opacus_expm.gathering.passes import Workbench
    from opacus_expm.gathering.ranks import Ranks

    recipe, criterion = recipe_of(projection), torch.nn.CrossEntropyLoss()
    bench = Workbench(model, Measurement(recipe, DIM, criterion, grad_sampling=GradSampling("hooks"), progress=False))
    looks.prepare(bench, loader)
    one = bench.open(ClippingBounds(1.0, 1.0 if rows > 1 else 0.0), RECORDS, Ranks(), bench.pieces.padded(loader))
    return (one.add_pieces([piece]) for piece in bench.begin(loader, "loader"))


def recipe_of(projection: str):
    """A subspace by its name, with a seed."""
    from opacus_expm.subspaces import named

    return named(projection).seeded(0)


def dimensions(dim: int) -> dict:
    """A pass with exact curvature, the eigendecomposition and one draw."""
    from opacus_expm.mechanism.sampling import Exact

    model, loader = perceptron(DIM_PARAMETERS, DIM_RECORDS)
    empty = peak_mb()
    statistics, seconds = cpu_seconds(lambda: gather(model, loader, dim))
    pass_mb = peak_mb() - empty
    density, spectrum = cpu_seconds(lambda: statistics.density(1.0, 0.5, 1.0))
    _, draw = cpu_seconds(lambda: Exact().sample(density, np.random.default_rng(0)))
    return {
        "k": dim, "rows": DIM_RECORDS * (OUTPUTS - 1), "pass": seconds, "pass_mb": pass_mb, "spectrum": spectrum,
        "draw": draw, "mb": peak_mb() - empty, "update": update_seconds(dim),
    }  # fmt: skip


def update_seconds(dim: int) -> float:
    """Of one row in the symmetric update of S."""
    import torch

    from opacus_expm.gathering.symmetric import SymmetricSum

    total, rows = SymmetricSum(dim, torch.device("cpu")), torch.randn(288, dim, dtype=torch.float64)
    total.add(rows)
    repeats = max(2, int(2e9 / (dim**2 * len(rows))))
    _, seconds = cpu_seconds(lambda: [total.add(rows) for _ in range(repeats)])
    return seconds / (repeats * len(rows))


ITEMS = {
    "records": [f"records {part} {count}" for part in GROWING for count in SIZES],
    "ranks": [f"ranks {count} {records}" for count, records in RANK_JOBS.values()],
    "parameters": [f"parameters {size} {way} {rows}" for size in WIDTHS for rows in ROWS for way in WAYS],
    "dimensions": [f"dimensions {dim}" for dim in DIMS],
}
MEASURES = {"records": records, "ranks": ranks, "shared": shared, "parameters": parameters, "dimensions": dimensions}


def run_one(item: str, log: Path) -> dict:
    """Measure one item in this process; a rank's log is the directory in which its job meets."""
    import torch

    import opacus_expm  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, *arguments = item.split()
    options = {"directory": str(log)} if kind == "shared" else {}
    return MEASURES[kind](*(int(a) if a.isdigit() else a for a in arguments), **options)


def measure(names: list[str], log: Path) -> Timings:
    """All items of these parts: from the log, or in processes of their own."""
    journal = Journal(log, "scale")

    def run(item: str) -> dict:
        return timing.report(timing.start(__spec__.name, "--log", str(log), "--one", item))

    runs: dict[str, list[dict]] = {}
    for name in names:
        rounds = {"ranks": RANK_REPEATS, "records": SIZE_REPEATS}.get(name, 1)
        runs |= timing.interleaved(ITEMS[name], run, journal, rounds=rounds).runs
    return Timings(runs)


def print_records(found: Timings) -> None:
    """CPU seconds by n, and the line through all runs, whose errors grow with n: its slope, and what is paid once."""
    print(
        f"CNN with 6,722 parameters, CPU s, medians of {SIZE_REPEATS}, and a line through all runs with standard errors"
    )
    sizes = " ".join(f"{count:>8,}" for count in SIZES)
    print(f"{'':>10} {sizes} {'ms/record':>10} {'±':>6} {'once, s':>8} {'±':>5}")
    for part in GROWING:
        runs = {count: found.runs[f"records {part} {count}"] for count in SIZES}
        n, seconds = np.array([(count, run["cpu"]) for count in SIZES for run in runs[count]]).T
        line, spread = np.polyfit(n, seconds, 1, w=1 / n, cov=True)
        (slope, once), errors = line, np.sqrt(np.diag(spread))
        cells = " ".join(f"{found.median(f'records {part} {count}', 'cpu'):8.2f}" for count in SIZES)
        print(f"{part:>10} {cells} {1e3 * slope:10.3f} {1e3 * errors[0]:6.3f} {once:8.2f} {errors[1]:5.2f}")


def print_ranks(found: Timings) -> None:
    """Medians of the slowest rank, and what one rank would have needed for the same over what the ranks needed together."""

    def median(job: str, fact: str) -> float:
        count, records = RANK_JOBS[job]
        return found.median(f"ranks {count} {records}", fact)

    alone = {fact: median("1 rank", fact) / RANK_RECORDS for fact in ("seconds", "cpu")}
    print(f"CNN with 6,722 parameters, k = {DIM}, batch {RANK_BATCH}, exact curvature; one thread a rank")
    print(
        f"{'':>16} {'records':>8} {'seconds':>8} {'CPU s a rank':>13} {'adding up, ms':>14} {'MB a rank':>10} "
        f"{'efficiency':>11} {'in CPU time':>12}"
    )
    for job, (count, records) in RANK_JOBS.items():
        efficiency = {fact: alone[fact] * records / (count * median(job, fact)) for fact in alone}
        print(
            f"{job:>16} {records:8} {median(job, 'seconds'):8.2f} {median(job, 'cpu'):13.2f} "
            f"{1e3 * median(job, 'exchange'):14.1f} {median(job, 'mb'):10.0f} {efficiency['seconds']:11.2f} "
            f"{efficiency['cpu']:12.2f}"
        )


def print_parameters(found: Timings) -> None:
    """Time a row and memory by p, and how many times as much the largest model needs as the smallest."""
    print(
        f"k = {DIM}, {OUTPUTS} outputs, batch {BATCH}, CPU time of a row, its standard error, memory, and what is paid once"
    )
    for rows in ROWS:
        print(f"{rows} row(s) a record")
        print(f"{'p':>12} " + " ".join(f"{way + ', ms':>16} {'±':>6} {'MB':>5} {'once, s':>7}" for way in WAYS))
        for size in WIDTHS:
            runs = [found.runs[f"parameters {size} {way} {rows}"][0] for way in WAYS]
            each = [(1e3 * run["per_record"] / rows, 1e3 * run["error"] / rows, run["mb"], run["once"]) for run in runs]
            cells = (f"{ms:16.3f} {error:6.3f} {mb:5.0f} {once:7.1f}" for ms, error, mb, once in each)
            print(f"{runs[0]['p']:12,} " + " ".join(cells))
        for way in WAYS:
            few, many = (found.runs[f"parameters {size} {way} {rows}"][0] for size in (min(WIDTHS), max(WIDTHS)))
            print(
                f"{way}: {many['per_record'] / few['per_record']:.0f} times for {many['p'] / few['p']:.0f} times as many"
            )


def print_dimensions(found: Timings) -> None:
    """Time and memory by k."""
    print(f"p = {DIM_PARAMETERS:,}, {DIM_RECORDS} records with {OUTPUTS - 1} rows each, batch {BATCH}; S is one matrix")
    print(
        f"{'k':>6} {'S, MB':>6} {'pass, s':>8} {'MB':>6} {'µs/row of S':>12} {'spectrum, s':>12} {'draw, s':>8} {'MB':>6}"
    )
    for dim in DIMS:
        row = found.runs[f"dimensions {dim}"][0]
        print(
            f"{dim:6} {8 * dim**2 / 2**20:6.0f} {row['pass']:8.1f} {row['pass_mb']:6.0f} {1e6 * row['update']:12.1f} "
            f"{row['spectrum']:12.2f} {row['draw']:8.3f} {row['mb']:6.0f}"
        )


def estimate(found: Timings) -> dict:
    """Core hours, memory and traffic for 10⁹ records and parameters, each unit cost from the largest measured size.

    The projection is the structured one.

    With u_r the cost of a record with r rows per parameter that is used at one position (forward, and r times backward,
    per-sample gradient and projection), h that of a row of S per k², and e that of the eigendecomposition per k³:

        records · (p·u_r + r·k²·h) + k³·e.

    A model that uses its parameters at T positions of a record (tokens) pays the forward and backward part T times.
    """
    unit = {
        rows: run["per_record"] / run["p"]
        for rows, run in (
            (rows, found.runs[f"parameters {max(WIDTHS)} structured {rows}"][0]) for rows in reversed(ROWS)
        )
    }
    top = found.runs[f"dimensions {max(DIMS)}"][0]
    h, e = top["update"] / top["k"] ** 2, top["spectrum"] / top["k"] ** 3
    n, p = ESTIMATE["records"], ESTIMATE["parameters"]
    print(f"{n:.0e} records, {p:.0e} parameters, one position a record; unit costs:")
    costs = ", ".join(f"{1e9 * cost:.1f} ns with {rows} row(s)" for rows, cost in unit.items())
    print(f"a record and parameter {costs}; a row of S {1e12 * h:.0f} ps · k²; eigenvectors {1e12 * e:.0f} ps · k³")
    print(f"{'k':>6} {'rows':>5} {'core hours':>11} {'of S':>9} {'spectrum':>9} {'S':>7} {'sent':>7}")
    table = []
    for dim in ESTIMATE["dims"]:
        for rows, cost in unit.items():
            update = n * rows * dim**2 * h / 3600
            row = {
                "k": dim, "rows": rows, "core_hours": n * p * cost / 3600 + update, "of_s": update,
                "spectrum": e * dim**3, "s_mb": 8 * dim**2 / 1e6,
                "sent_mb": 8 * (dim + dim * (dim + 1) / 2) / 1e6,
            }  # fmt: skip
            table.append(row)
            print(
                f"{dim:6} {rows:5} {row['core_hours']:11.2e} {update:9.1e} {row['spectrum']:7.0f} s "
                f"{row['s_mb']:4.0f} MB {row['sent_mb']:4.0f} MB"
            )
    return {"record_and_parameter": unit, "update": h, "spectrum": e, "table": table}


PRINTED = {
    "records": print_records, "ranks": print_ranks, "parameters": print_parameters, "dimensions": print_dimensions,
}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[*ITEMS, "estimate"])
    parser.add_argument("--log", type=Path, required=True, help="finished measurements, one line of JSON each")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.log)))
        return
    estimated = ["parameters", "dimensions"] if "estimate" in options.parts else []
    needed = [part for part in ITEMS if part in (*options.parts, *estimated)]
    found = measure(needed, options.log)
    results: dict[str, object] = {"measured": found.runs}
    for part in options.parts:
        if part == "estimate":
            results["estimate"] = estimate(found)
        else:
            PRINTED[part](found)
        print()
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
