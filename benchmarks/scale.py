"""How the cost of a pass grows: with ranks that share it.

    python benchmarks/scale.py ranks [--records 4096] [--dim 400] [--repeats 3] [--out scale.json]

Every measurement is a job of processes of its own, one thread each, which report seconds (without start-up) and peak
resident memory. Each part of the benchmark is a function from the command line's arguments to rows of a table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

sys.path = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]  # it has a "statistics"

Row = dict[str, float | int | str]
Part = Callable[[argparse.Namespace], list[Row]]
BATCH = 128


def run_job(worker: str, count: int, **settings: int) -> list[Row]:
    """What the processes of one job report, in the order of ranks."""
    with tempfile.TemporaryDirectory() as directory:
        options = [f"--{name}={value}" for name, value in settings.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        job = [
            subprocess.Popen(
                [sys.executable, __file__, "worker", worker, f"{rank}", f"{count}", directory, *options],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(count)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in job]


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# --- Ranks: one pass over random images with the paper's CNN, by one and by two processes -----------------------------


def shared_pass(rank: int, count: int, directory: str, *, records: int, dim: int) -> Row:
    """One rank's share of a pass, and how long its exchange with the others took."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from opacus_expm import ExpMQuadEngine, ranks, tasks

    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=count)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(records, 1, 28, 28), torch.randint(10, (records,)))
    model, engine, exchanged = tasks.cnn(), ExpMQuadEngine(), 0.0
    add_up = ranks.Ranks.summed

    def timed(self, values):
        nonlocal exchanged
        self.ready()  # waiting for the other rank's pass is no exchange
        begin = time.perf_counter()
        found = add_up(self, values)
        exchanged += time.perf_counter() - begin
        return found

    ranks.Ranks.summed = timed
    begin, cpu = time.perf_counter(), time.process_time()
    engine.gather(
        model,
        DataLoader(dataset, batch_size=BATCH),
        dim,
        criterion=nn.CrossEntropyLoss(),
        max_grad_norm=1.0,
        max_curvature=1.0,
        projection="sparse",
        projection_seed=0,
    )
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    if count > 1:
        dist.destroy_process_group()
    return {"seconds": seconds, "cpu seconds": cpu, "exchange": exchanged, "memory": peak_mib()}


def ranks_part(arguments: argparse.Namespace) -> list[Row]:
    """Strong scaling (the same records) and weak scaling (the same records a rank); medians of interleaved jobs."""
    jobs = {
        "1 rank": (1, arguments.records),
        "2 ranks, the same records (strong)": (2, arguments.records),
        "2 ranks, twice the records (weak)": (2, 2 * arguments.records),
    }
    found: dict[str, list[list[Row]]] = {name: [] for name in jobs}
    for _ in range(arguments.repeats):
        for name, (count, records) in jobs.items():
            found[name].append(run_job("shared_pass", count, records=records, dim=arguments.dim))

    def median(name: str, fact: str) -> float:
        return sorted(max(float(report[fact]) for report in job) for job in found[name])[arguments.repeats // 2]

    alone = median("1 rank", "seconds"), median("1 rank", "cpu seconds")
    rows: list[Row] = []
    for name, (count, records) in jobs.items():
        work = records / arguments.records
        rows.append(
            {
                "job": name,
                "records": records,
                "seconds": round(median(name, "seconds"), 2),
                "CPU seconds a rank": round(median(name, "cpu seconds"), 2),
                "exchange, ms": round(1000 * median(name, "exchange"), 1),
                "memory a rank, MiB": round(median(name, "memory")),
                "efficiency": round(work * alone[0] / (count * median(name, "seconds")), 2),
                "efficiency in CPU time": round(work * alone[1] / (count * median(name, "cpu seconds")), 2),
            }
        )
    return rows


# --- The table --------------------------------------------------------------------------------------------------------

PARTS: dict[str, Part] = {"ranks": ranks_part}
WORKERS: dict[str, Callable[..., Row]] = {"shared_pass": shared_pass}


def table(rows: Sequence[Row]) -> str:
    """Rows in Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def work(arguments: Sequence[str]) -> None:
    """One process of a job; its report is the last line that it prints."""
    name, rank, count, directory, *options = arguments
    settings = {key: int(value) for key, value in (option[2:].split("=") for option in options)}
    print(json.dumps(WORKERS[name](int(rank), int(count), directory, **settings)))


def main() -> None:
    """Run the parts that are asked for."""
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=list(PARTS), help="all by default")
    parser.add_argument("--records", type=int, default=4096, help="of the pass that ranks share")
    parser.add_argument("--dim", type=int, default=400, help="its k")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="JSON file")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.parts:
        results[name] = PARTS[name](arguments)
        print(f"\n{name}\n\n{table(results[name])}", flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
