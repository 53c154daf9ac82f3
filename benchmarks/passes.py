"""What one statistics pass costs, beside a plain epoch, an Opacus DP-SGD epoch and other ways to the same matrix.

    python -m benchmarks.passes [--records 20000] [--rounds 3] [--out passes.json] [--plot passes.png]
    python -m benchmarks.passes --profile

Each figure is the median of interleaved runs, each in a process of its own that reports seconds (without start-up) and
peak resident memory. The model is the paper's CNN (6,722 parameters, 10 outputs), the batch 512, the images random.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

from benchmarks import timing
from benchmarks.timing import Timings
from opacus_expm.experiments.journal import Facts, Journal

BATCH = 512
COMPARED = (
    "import only", "plain epoch", "dp-sgd epoch",
    "exact sparse 100", "exact sparse 400", "exact sparse 1600",
    "exact stiefel 100", "exact stiefel 400", "exact stiefel 1600",
    "sampled sparse 400", "gradient sparse 400", "naive stiefel 400",
)  # fmt: skip


CURVLINOPS = ("exact stiefel 20", "curvlinops 20")  # on one batch: without clipping, and one product for each column
LAPLACE = ("exact stiefel 400", "laplace full")  # on 8 records: the whole p × p matrix is built there
LAPLACE_RECORDS = 8
SCALING = ("outputs 2", "outputs 10", "outputs 20", "width 64", "width 256", "width 512")
SCALING_RECORDS = 4096


def data(records: int, outputs: int = 10):
    """Random images and labels."""
    import torch
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    return TensorDataset(torch.randn(records, 1, 28, 28), torch.randint(outputs, (records,)))


def plain_epoch(model, dataset) -> None:
    """Forward, backward, step."""
    import torch
    from torch.utils.data import DataLoader

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(dataset, batch_size=BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def dp_sgd_epoch(model, dataset) -> None:
    """One epoch of Opacus with its hooks."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader

    model.train()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(dataset, batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def our_pass(model, dataset, k: int, projection: str, **options) -> None:
    """One pass of the engine."""
    import torch
    from torch.utils.data import DataLoader

    from opacus_expm import ExpMQuadEngine, Sparse, Stiefel

    recipe = {"sparse": Sparse, "stiefel": Stiefel}[projection](seed=0)
    bounds = {"max_grad_norm": 1.0, "max_curvature": 1.0, **options}
    loader = DataLoader(dataset, batch_size=BATCH)
    ExpMQuadEngine().gather(model, loader, k, criterion=torch.nn.CrossEntropyLoss(), projection=recipe, **bounds)


def naive_pass(model, dataset, k: int) -> None:
    """vmap(jacrev) of the whole model, then the dense projection, then clipping and sums as ours."""
    import torch
    from torch.func import functional_call, jacrev, vmap
    from torch.utils.data import DataLoader

    from opacus_expm.subspaces.stiefel import Columns

    parameters = {n: p.detach() for n, p in model.named_parameters()}
    size = sum(p.numel() for p in parameters.values())
    a = Columns.uniform(size, k, 0, torch.device("cpu"), torch.float32).matrix
    rows_of = vmap(jacrev(lambda p, x: functional_call(model, p, (x[None],))[0]), in_dims=(None, 0))
    total = torch.zeros(k, k, dtype=torch.float64)
    for x, y in DataLoader(dataset, batch_size=BATCH):
        jacobian = rows_of(parameters, x)
        j = torch.cat([v.flatten(2) for v in jacobian.values()], 2) @ a
        sigma = torch.softmax(model(x).detach(), 1)
        root = torch.diag_embed(sigma.sqrt()) - sigma[:, :, None] * sigma.sqrt()[:, None]
        b = (root.transpose(1, 2) @ j).double()
        scale = (1.0 / torch.linalg.eigvalsh(b @ b.transpose(1, 2))[:, -1]).clamp(max=1).sqrt()
        b = (b * scale[:, None, None]).flatten(0, 1)
        total += b.T @ b
        y.sum()


def curvlinops_pass(model, dataset, k: int) -> None:
    """Curvlinops' Gauss-Newton operator applied to the k columns of A: no per-sample clipping is possible there."""
    import curvlinops
    import torch
    from torch.utils.data import DataLoader

    from opacus_expm.subspaces.stiefel import Columns

    parameters = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in parameters)
    operator = curvlinops.GGNLinearOperator(
        model, torch.nn.CrossEntropyLoss(reduction="sum"), parameters, list(DataLoader(dataset, batch_size=BATCH)),
        check_deterministic=False,
    )  # fmt: skip
    a = Columns.uniform(size, k, 0, torch.device("cpu"), torch.float32).matrix
    a.T @ (operator @ a)


def laplace_fit(model, dataset) -> None:
    """laplace-torch's full Gauss-Newton matrix of all parameters: p × p, p products, no per-sample clipping."""
    from laplace import Laplace
    from torch.utils.data import DataLoader

    posterior = Laplace(model, "classification", subset_of_weights="all", hessian_structure="full")
    posterior.fit(DataLoader(dataset, batch_size=BATCH))


def perceptron(kind: str, value: int):
    """A 64-feature perceptron whose number of outputs or hidden width is varied, and its data."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    outputs, width = (value, 256) if kind == "outputs" else (10, value)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )
    return model, TensorDataset(torch.randn(SCALING_RECORDS, 64), torch.randint(outputs, (SCALING_RECORDS,)))


def run_one(name: str, records: int) -> dict:
    """Measure one item in this process."""
    from opacus_expm import GradSampling, tasks  # which every item needs, and the empty one pays for too

    warnings.simplefilter("ignore")
    if name == "import only":
        seconds = 0.0
        data(records)
    else:
        kind, *rest = name.split()
        model, dataset = perceptron(kind, int(rest[0])) if name in SCALING else (tasks.cnn(), data(records))
        actions = {
            "outputs": lambda m, d: our_pass(m, d, 400, "sparse"),
            "width": lambda m, d: our_pass(m, d, 400, "sparse"),
            "plain": lambda m, d: plain_epoch(m, d),
            "dp-sgd": lambda m, d: dp_sgd_epoch(m, d),
            "exact": lambda m, d: our_pass(m, d, int(rest[1]), rest[0]),
            "sampled": lambda m, d: our_pass(m, d, int(rest[1]), rest[0], grad_sample_mode=GradSampling(probes=2)),
            "gradient": lambda m, d: our_pass(m, d, int(rest[1]), rest[0], max_curvature=0.0),
            "naive": lambda m, d: naive_pass(m.eval(), d, int(rest[1])),
            "curvlinops": lambda m, d: curvlinops_pass(m.eval(), d, int(rest[0])),
            "laplace": lambda m, d: laplace_fit(m.eval(), d),
        }
        _, seconds = timing.seconds(lambda: actions[kind](model, dataset))
    return {"seconds": seconds, "peak_mb": timing.peak_mb()}


def spawn(name: str, records: int) -> Facts | None:
    """Measure one item in a fresh process; None where it cannot run (a package is missing)."""
    try:
        return timing.report(timing.start(__spec__.name, "--one", name, "--records", str(records)))
    except RuntimeError as error:
        print(f"  {name}: not measured ({str(error).splitlines()[-1][:100]})", flush=True)
        return None


def table(found: Timings) -> None:
    """Seconds, ratio to the DP-SGD epoch, peak memory beside the DP-SGD step's."""
    empty, base = (found.median(name, "peak_mb") for name in ("import only", "dp-sgd epoch"))
    print(f"{'':22} {'seconds':>8} {'epochs':>7} {'peak MB':>8} {'above import':>13} {'of dp-sgd':>10}")
    for name, row in found.medians("seconds", "peak_mb").items():
        above, epochs = row["peak_mb"] - empty, found.ratio(name, "dp-sgd epoch", "seconds")
        print(
            f"{name:22} {row['seconds']:8.1f} {epochs:7.2f} {row['peak_mb']:8.0f} {above:13.0f} "
            f"{above / (base - empty):10.2f}",
            flush=True,
        )


def profile(records: int) -> None:
    """Where the time of an exact sparse pass goes."""
    import torch

    from opacus_expm import tasks

    warnings.simplefilter("ignore")
    dataset = data(records)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        our_pass(tasks.cnn(), dataset, 400, "sparse")
    print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


def plot(found: Timings, path: str) -> None:
    """Bars of the ratios to a DP-SGD epoch."""
    import matplotlib.pyplot as plt

    names = [n for n in found.runs if n != "import only"]
    ratios = [found.ratio(n, "dp-sgd epoch", "seconds") for n in names]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.barh(names[::-1], ratios[::-1], color="0.5")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time, in Opacus DP-SGD epochs")
    axes.set_title("One pass over the data (CNN, 6,722 parameters, 10 outputs)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measured(options) -> dict[str, Timings]:
    """All parts, each shown as soon as it is there."""
    journal = Journal(options.log, "passes")

    def measure(names, records: int) -> Timings:
        return timing.interleaved(
            names, lambda name: spawn(name, records), journal, rounds=options.rounds, common={"records": records}
        )

    found = {"single": measure(COMPARED, options.records)}
    print(f"{options.records} records, batch {BATCH}, median of {options.rounds}")
    table(found["single"])
    twice = "exact sparse 400"
    found["double"] = measure(("import only", "dp-sgd epoch", twice), 2 * options.records)
    print(f"{2 * options.records} records")
    table(found["double"])
    growth = found["double"].median(twice, "seconds") / found["single"].median(twice, "seconds")
    print(f"time, {2 * options.records} against {options.records} records: {growth:.2f}")
    found["curvlinops"] = measure(CURVLINOPS, BATCH)
    other = found["curvlinops"].medians("seconds").items()
    print(f"one batch of {BATCH}, k = 20: " + ", ".join(f"{n} {r['seconds']:.1f} s" for n, r in other))
    found["laplace"] = measure(LAPLACE, LAPLACE_RECORDS)
    whole = found["laplace"].medians("seconds", "peak_mb").items()
    print(
        f"{LAPLACE_RECORDS} records: " + ", ".join(f"{n} {r['seconds']:.1f} s, {r['peak_mb']:.0f} MB" for n, r in whole)
    )
    found["scaling"] = measure(SCALING, SCALING_RECORDS)
    print(f"exact pass, sparse, k = 400, perceptron with two hidden layers, {SCALING_RECORDS} records")
    for name, row in found["scaling"].medians("seconds", "peak_mb").items():
        print(f"{name:22} {row['seconds']:8.2f} s {row['peak_mb']:8.0f} MB")
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument(
        "--log", type=Path, help="file to which single measurements go, and from which a run is resumed"
    )
    parser.add_argument("--plot", help="PNG file for a bar chart")
    parser.add_argument("--profile", action="store_true", help="profile one exact pass instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.records)))
        return
    if options.profile:
        profile(min(options.records, 4096))
        return
    found = measured(options)
    if options.out:
        medians = {part: timings.medians("seconds", "peak_mb") for part, timings in found.items()}
        with open(options.out, "w") as file:
            json.dump({"records": options.records, "batch": BATCH, **medians}, file, indent=1)
    if options.plot:
        plot(found["single"], options.plot)


if __name__ == "__main__":
    main()
