"""What the parts of a round cost, beside the least that they could, DP-SGD epochs and other ways to the same matrix.

    python -m benchmarks.passes [digits | lora | full] [--records 20000] [--rounds 3] [--log FILE] [--out FILE]
    python -m benchmarks.passes digits --items "direction" "metric" --profile

Each figure is the median of interleaved runs, each in a process of its own that reports seconds, CPU seconds (both without
start-up) and peak resident memory. ``digits`` has the paper's CNN (6,722 parameters, 10 outputs) on
random images, 512 at a time; ``lora`` and ``full`` have the encoder of ``benchmarks.encoder`` with 22 million parameters.

The floors are what cannot be avoided, as plain PyTorch does it. A direction needs a forward and a backward pass, an exact
pass of m outputs one forward pass, m − 1 backward passes and as many projections of every record's gradient to k numbers.
``floor compiled`` is that of a direction with ``torch.compile``, without the time of compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path

from benchmarks import timing
from benchmarks.timing import Timings
from opacus_expm.experiments.journal import Facts, Journal

BATCH = {"digits": 512, "lora": 32, "full": 32}
RECORDS = {"digits": 20_000, "lora": 512, "full": 128}
FLOORS = {"floor direction": "direction", "floor exact": "exact sparse 400"}
ITEMS = (
    "import only", "dp-sgd epoch", "dp-sgd ghost", *FLOORS, "floor compiled", "direction", "metric",
    "gradient sparse 400", "sampled sparse 400", "exact sparse 400", "exact structured 400", "exact stiefel 400",
    "naive stiefel 400",
)  # fmt: skip
LEFT_OUT = {
    "digits": (),
    "lora": ("floor compiled", "exact stiefel 400", "naive stiefel 400", "sampled sparse 400"),
    "full": ("floor compiled", "exact stiefel 400", "naive stiefel 400", "sampled sparse 400"),  # p × k
}
DOUBLED = ("direction", "metric", "exact sparse 400")


class Problem:
    """A model with its records.

    Args:
        name: one of ``BATCH``.
        records: how many; there are as many tokens or pixels in each.
    """

    def __init__(self, name: str, records: int):
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        from opacus_expm import tasks

        self.records, self.outputs, self.criterion = records, 10 if name == "digits" else 2, nn.CrossEntropyLoss()
        torch.manual_seed(0)
        if name == "digits":
            data = TensorDataset(torch.randn(records, 1, 28, 28), torch.randint(10, (records,)))
            self.model, self.loader = tasks.cnn(), DataLoader(data, batch_size=BATCH[name])
            return
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from benchmarks import encoder

        parts = encoder.parts()
        private = TensorDataset(*(t[:records] for t in parts["private"].tensors))
        self.model = encoder.trainable(encoder.start(parts["public"]), name)
        self.loader = encoder.loader(private, BATCH[name])

    def bench(self):
        """A workbench in the full space, prepared, and one in the metric of the first batch's factors.

        Of these are taken as many directions as the rule would tell from noise at ε = 8 and with 100,000 records.
        """
        import numpy as np

        from opacus_expm.gathering import looks
        from opacus_expm.gathering.factors import edge
        from opacus_expm.gathering.measurement import Measurement
        from opacus_expm.gathering.passes import Workbench
        from opacus_expm.rule import Rule
        from opacus_expm.subspaces import Sparse
        from opacus_expm.subspaces.metric import Metric, Spectrum

        start = Workbench(self.model, Measurement(Sparse(seed=0), None, self.criterion, progress=False))
        looks.prepare(start, self.loader)
        few = self.first()
        sums = looks.factors(start, few, np.random.default_rng(0))

        blocks = looks.blocks(start)
        noise = 1 / Rule(8.0, 1e-5, 100_000, len(blocks), bounded=True, head=False).factor_mu / 100_000

        def spectrum(total):
            return Spectrum.of(total / len(few.dataset)).seen(edge(len(total), noise))

        pairs = [(spectrum(a), spectrum(b)) for a, b in zip(sums.inputs, sums.outputs, strict=True)]
        found = start.within(Metric.damped(blocks, pairs, [1.0] * len(blocks), 1e-3))
        looks.prepare(found, self.loader)
        return start, found

    def first(self):
        """The records of the first batch."""
        from torch.utils.data import DataLoader, Subset

        size = self.loader.batch_size
        return DataLoader(Subset(self.loader.dataset, range(size)), size, collate_fn=self.loader.collate_fn)


def floor(problem: Problem, part: str):
    """The products that a part of a round cannot do without; ``part`` is what follows the word "floor"."""
    import torch

    from opacus_expm.gathering.model import call

    model = problem.model.eval().to(memory_format=torch.channels_last)  # the faster one
    trainable = [p for p in model.parameters() if p.requires_grad]
    size, backward = sum(p.numel() for p in trainable), problem.outputs - 1 if part == "exact" else 1
    bucket, some = torch.arange(size) % 400, max(1, 2**20 // size)  # a few records at a time, which stay in cache
    gradients = torch.ones(some, size)

    network = torch.compile(model) if part == "compiled" else model
    if part == "compiled":
        for inputs, _ in problem.loader:  # of every size that comes
            network(inputs).sum().backward()
        model.zero_grad()

    def run() -> None:
        for inputs, _ in problem.loader:
            outputs = call(network, inputs)
            for number in range(backward):
                torch.autograd.grad(outputs[:, number].sum(), trainable, retain_graph=number + 1 < backward)
                if part == "exact":
                    for _ in range(0, len(outputs), some):
                        torch.zeros(some, 400).scatter_add_(1, bucket.expand(some, -1), gradients)

    return run


def dp_sgd(problem: Problem, mode: str):
    """One epoch of Opacus, with its hooks or with ghost clipping."""
    import torch
    from opacus import PrivacyEngine

    from opacus_expm.gathering.model import call

    model = problem.model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    made = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, criterion=problem.criterion, data_loader=problem.loader, noise_multiplier=1.0,
        max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    model, optimizer, *rest = made
    criterion, loader = rest if len(rest) == 2 else (problem.criterion, rest[0])

    def run() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(call(model, inputs), targets).backward()
            optimizer.step()

    return run


def part_of_a_round(problem: Problem, kind: str):
    """The metric, or a direction over all records."""
    import numpy as np

    from opacus_expm.gathering import looks
    from opacus_expm.gathering.clipping import ClippingBounds
    from opacus_expm.gathering.ranks import Ranks

    start, bench = problem.bench()
    if kind == "metric":
        return lambda: looks.factors(start, problem.loader, np.random.default_rng(0))

    def direction():
        one = bench.open(ClippingBounds(1.0, 0.0), problem.records, Ranks(), bench.pieces.padded(problem.loader))
        one.add_pieces(bench.begin(problem.loader, "loader"))
        return one.sums()

    return lambda: bench.in_memory(direction, problem.loader, "loader")


def our_pass(problem: Problem, kind: str, projection: str, k: int):
    """One pass of the source paper's draw."""
    from opacus_expm import ExpMQuadEngine, GradSampling
    from opacus_expm.subspaces import named

    recipe = named(projection).seeded(0)
    options = {"max_grad_norm": 1.0, "max_curvature": 0.0 if kind == "gradient" else 1.0}
    if kind == "sampled":
        options["grad_sample_mode"] = GradSampling(probes=2)
    common = {"criterion": problem.criterion, "projection": recipe, "progress": False, **options}
    return lambda: ExpMQuadEngine().gather(problem.model, problem.loader, k, **common)


def naive_pass(problem: Problem, k: int):
    """vmap(jacrev) of the whole model, then the dense projection, then clipping and sums as ours."""
    import torch
    from torch.func import functional_call, jacrev, vmap

    from opacus_expm.subspaces.stiefel import Columns

    model = problem.model.eval()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    size = sum(p.numel() for p in parameters.values())
    a = Columns.uniform(size, k, 0, torch.device("cpu"), torch.float32).matrix
    rows_of = vmap(jacrev(lambda p, x: functional_call(model, p, (x[None],))[0]), in_dims=(None, 0))
    total = torch.zeros(k, k, dtype=torch.float64)

    def run() -> None:
        for x, _ in problem.loader:
            jacobian = rows_of(parameters, x)
            j = torch.cat([v.flatten(2) for v in jacobian.values()], 2) @ a
            sigma = torch.softmax(model(x).detach(), 1)
            root = torch.diag_embed(sigma.sqrt()) - sigma[:, :, None] * sigma.sqrt()[:, None]
            b = (root.transpose(1, 2) @ j).double()
            scale = (1.0 / torch.linalg.eigvalsh(b @ b.transpose(1, 2))[:, -1]).clamp(max=1).sqrt()
            b = (b * scale[:, None, None]).flatten(0, 1)
            total.add_(b.T @ b)

    return run


def action(problem: Problem, item: str):
    """What is measured, ready to run."""
    kind, *rest = item.split()
    if kind == "floor":
        return floor(problem, rest[0])
    if kind == "dp-sgd":
        return dp_sgd(problem, {"epoch": "hooks", "ghost": "ghost"}[rest[0]])
    if kind in ("direction", "metric"):
        return part_of_a_round(problem, kind)
    return naive_pass(problem, int(rest[1])) if kind == "naive" else our_pass(problem, kind, rest[0], int(rest[1]))


def run_one(name: str, item: str, records: int) -> Facts:
    """Measure one item in this process."""
    import opacus_expm  # noqa: F401  (every item needs it, and the empty one pays for it too)

    warnings.simplefilter("ignore")
    problem = Problem(name, records)
    if item == "import only":
        return {"seconds": 0.0, "cpu": 0.0, "peak_mb": timing.peak_mb()}
    run = action(problem, item)
    (_, cpu), seconds = timing.seconds(lambda: timing.cpu_seconds(run))
    return {"seconds": seconds, "cpu": cpu, "peak_mb": timing.peak_mb()}


def spawn(name: str, item: str, records: int) -> Facts | None:
    """Measure one item in a fresh process; None where it cannot run (a package is missing)."""
    try:
        return timing.report(timing.start(__spec__.name, name, "--one", item, "--records", str(records)))
    except RuntimeError as error:
        print(f"  {item}: not measured ({str(error).splitlines()[-1][:100]})", flush=True)
        return None


def table(found: Timings) -> None:
    """Seconds, ratios of CPU time to the floor and to the DP-SGD epochs, peak memory beside the DP-SGD step's."""
    known = found.runs
    bases = [base for base in ("dp-sgd epoch", "dp-sgd ghost") if base in known]
    floors = {part: least for least, part in FLOORS.items() if least in known}
    empty = found.median("import only", "peak_mb") if "import only" in known else 0.0
    print(
        f"{'':20} {'s':>8} {'CPU s':>8} {'÷ floor':>8} " + " ".join(f"{'÷ ' + b:>15}" for b in bases) + "  above import"
    )
    for item in known:
        least = f"{found.ratio(item, floors[item], 'cpu'):8.2f}" if item in floors else " " * 8
        shares = " ".join(f"{found.ratio(item, b, 'cpu'):8.2f} ({found.ratio(item, b, 'seconds'):4.2f})" for b in bases)
        above = found.median(item, "peak_mb") - empty
        times = f"{found.median(item, 'seconds'):8.2f} {found.median(item, 'cpu'):8.2f}"
        print(f"{item:20} {times} {least} {shares} {above:8.0f} MB", flush=True)


def measured(options) -> dict[str, Timings]:
    """All items, and some of them on twice as many records."""
    journal, name = Journal(options.log, "passes"), options.model
    records = options.records or RECORDS[name]
    items = options.items or [item for item in ITEMS if item not in LEFT_OUT[name]]

    def measure(items, records: int) -> Timings:
        common = {"model": name, "records": records}
        return timing.interleaved(
            items, lambda item: spawn(name, item, records), journal, rounds=options.rounds, common=common
        )

    single = measure(items, records)
    print(
        f"{name}: {records} records, batch {BATCH[name]}, medians of {options.rounds}; ratios are of CPU time (of time)"
    )
    table(single)
    double = measure([item for item in DOUBLED if item in single.runs], 2 * records)
    for item in double.runs:
        growth = double.median(item, "cpu") / single.median(item, "cpu")
        print(f"{item}: {growth:.2f} times the CPU time for twice as many records")
    return {"single": single, "double": double}


def profile(name: str, item: str, records: int) -> None:
    """Where the time of an item goes."""
    import torch

    warnings.simplefilter("ignore")
    run = action(Problem(name, records), item)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run()
    print(item, recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=15), sep="\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="digits", choices=BATCH)
    parser.add_argument("--records", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", nargs="+", choices=ITEMS, metavar="ITEM")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument(
        "--log", type=Path, help="file to which single measurements go, and from which a run is resumed"
    )
    parser.add_argument("--profile", action="store_true", help="profile the items instead, on few records")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.model, options.one, options.records)))
        return
    if options.profile:
        for item in options.items or ["direction"]:
            profile(options.model, item, options.records or 4 * BATCH[options.model])
        return
    found = measured(options)
    if options.out:
        medians = {part: timings.medians("seconds", "cpu", "peak_mb") for part, timings in found.items()}
        with open(options.out, "w") as file:
            json.dump({"records": options.records, "batch": BATCH[options.model], **medians}, file, indent=1)


if __name__ == "__main__":
    main()
