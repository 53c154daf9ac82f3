"""Whether workers read records while others are computed with, beside a plain loop of PyTorch.

    python -m benchmarks.loading [--records 512] [--pause 4] [--ways "plain loop" "private loop"] [--log FILE]

The data set pauses for so many milliseconds before it gives a record, as one that waits for a disk does. Every way runs in a
process of its own: without pauses and workers, which is what it computes; and with pauses and none, one or two workers.
The model is the source paper's CNN. CPU seconds include the workers', and are none for pauses.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path

from benchmarks import timing
from opacus_expm.experiments.journal import Facts, Journal

BATCH, EPOCHS = 64, 3
SETTINGS = {"no pause": (False, 0), "no workers": (True, 0), "one worker": (True, 1), "two workers": (True, 2)}


def loader(records: int, milliseconds: float, workers: int):
    """Random images from a slow data set."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    images, classes = torch.randn(records, 1, 28, 28), torch.randint(10, (records,))

    class Slow(Dataset):
        def __len__(self):
            return records

        def __getitem__(self, index):
            time.sleep(milliseconds / 1000)
            return images[index], classes[index]

    return DataLoader(Slow(), batch_size=BATCH, num_workers=workers)


def plain(data) -> None:
    """Epochs of SGD."""
    import torch

    from opacus_expm import tasks

    model = tasks.cnn()
    _epochs(model, torch.optim.SGD(model.parameters(), lr=0.01), data)


def loop(data) -> None:
    """The same script after the call of the engine."""
    import torch

    from opacus_expm import ExpMQuadEngine, tasks

    model = tasks.cnn()
    made = ExpMQuadEngine().make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), data_loader=data, target_epsilon=1.0,
        target_delta=1e-5, epochs=EPOCHS, max_grad_norm=None,
    )  # fmt: skip
    _epochs(*made)


def _epochs(model, optimizer, data) -> None:
    import torch

    for _ in range(EPOCHS):
        for inputs, targets in data:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def call(data, **options) -> None:
    """One call of the engine."""
    import torch

    from opacus_expm import ExpMQuadEngine, tasks

    ExpMQuadEngine().make_private_expm(
        tasks.cnn(), data, 1.0, delta=1e-5, criterion=torch.nn.CrossEntropyLoss(), progress=False, **options
    )


def draw(data) -> None:
    """One draw of the source paper's, with given bounds: one pass."""
    call(data, radius=0.1, proj_dim=400, max_grad_norm=1.0, max_curvature=1.0)


WAYS = {"plain loop": plain, "private loop": loop, "one draw": draw, "without a radius": call}


def run_one(way: str, setting: str, records: int, pause: float) -> Facts:
    """Seconds and CPU seconds of a way in this process, whose workers have ended by then."""
    import torch

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    paused, workers = SETTINGS[setting]
    data, before = loader(records, pause if paused else 0.0, workers), sum(os.times()[:4])
    _, seconds = timing.seconds(lambda: WAYS[way](data))
    return {"seconds": seconds, "cpu": sum(os.times()[:4]) - before}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=512)
    parser.add_argument("--pause", type=float, default=4.0, help="milliseconds before each record")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--log", type=Path, help="finished measurements, one line of JSON each")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = ("--records", str(options.records), "--pause", str(options.pause))
    if options.one:
        print(json.dumps(run_one(*options.one, options.records, options.pause)))
        return
    items = {f"{way}, {setting}": (way, setting) for way in options.ways for setting in SETTINGS}
    found = timing.interleaved(
        list(items),
        lambda item: timing.report(timing.start(__spec__.name, "--one", *items[item], *size)),
        Journal(options.log, "loading"),
        common={"records": options.records, "pause": options.pause},
    )
    print(f"{options.records} records, {options.pause:g} ms for each; seconds (CPU seconds)")
    print(f"{'':>18} " + " ".join(f"{setting:>16}" for setting in SETTINGS))
    for way in options.ways:
        runs = [f"{way}, {setting}" for setting in SETTINGS]
        cells = (f"{found.median(run, 'seconds'):8.1f} ({found.median(run, 'cpu'):5.1f})" for run in runs)
        print(f"{way:>18} " + " ".join(cells))


if __name__ == "__main__":
    main()
