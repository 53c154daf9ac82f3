"""Three models as a newcomer would bring them, with no argument beyond model, loader, ε and δ; DP-SGD beside them.

    python -m benchmarks.newcomers rotated cifar10_head sms_lora --log newcomers.jsonl [--epsilon 1] [--seeds 3]
    python -m benchmarks.newcomers --log newcomers.jsonl --report

* ``rotated``: a convolutional network with BatchNorm, pretrained on upright digits; private digits are turned by 45 degrees.
* ``cifar10_head``: a new linear head on the features of EfficientNet-Lite0 (``opacus_expm.tasks.cifar10_head``).
* ``sms_lora``: a Hugging Face encoder with LoRA adapters and a head (``opacus_expm.tasks.sms_lora``).

DP-SGD is Opacus's, with two learning rates that were fixed for all three tasks in advance, momentum 0.9, clipping norm 1,
twenty steps an epoch and ten epochs. It cannot train BatchNorm, so that it gets the network with each BatchNorm folded into
the convolution before it, which is the same function. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, datasets, tasks
from opacus_expm._tables import markdown
from opacus_expm.baselines import dp_sgd, non_private

DELTA = 1e-5
RATES = (0.03, 0.3)
FIRST_SEED = 100  # the suite has 0 to 4


def rotated_digits(seed: int) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Upright public digits, and private and test digits that are turned by 45 degrees; 10,000 of each."""
    train_x, train_y, test_x, test_y = map(torch.tensor, datasets.mnist())
    chosen = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(seed))

    def part(images: Tensor, labels: Tensor, degrees: float) -> TensorDataset:
        x = (images[:, None] / 255 - 0.1307) / 0.3081
        turn = torch.deg2rad(torch.tensor(degrees))
        matrix = torch.stack([turn.cos(), -turn.sin(), torch.zeros(()), turn.sin(), turn.cos(), torch.zeros(())])
        grid = F.affine_grid(matrix.view(1, 2, 3).expand(len(x), -1, -1), list(x.shape), align_corners=False)
        return TensorDataset(F.grid_sample(x, grid, padding_mode="border", align_corners=False), labels.long())

    public, private = chosen[:10_000], chosen[10_000:20_000]
    return (
        part(train_x[public], train_y[public], 0.0),
        part(train_x[private], train_y[private], 45.0),
        part(test_x, test_y, 45.0),
    )


def rotated(seed: int) -> tasks.Task:
    """A network with BatchNorm that knows upright digits, and private digits that are turned by 45 degrees."""
    public, private, test = rotated_digits(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    criterion = nn.CrossEntropyLoss()
    start = non_private(model, public, criterion, learning_rate=3e-3, batch_size=100, epochs=3, seed=seed).eval()
    return tasks.Task(start, public, private, test, criterion, "rotated", "accuracy")


TASKS: dict[str, Callable[[int], tasks.Task]] = {
    "rotated": rotated,
    "cifar10_head": tasks.cifar10_head,
    "sms_lora": tasks.sms_lora,
}


def folded(model: nn.Module) -> nn.Module:
    """The same function of a record, without BatchNorm."""
    if not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()):
        return model
    layers: list[nn.Module] = []
    for layer in copy.deepcopy(model).eval().children():
        if isinstance(layer, nn.BatchNorm2d):
            before = layers.pop()
            assert isinstance(before, nn.Conv2d)
            layer = fuse_conv_bn_eval(before, layer)
        layers.append(layer)
    return nn.Sequential(*layers)


def ours(task: tasks.Task, epsilon: float, seed: int) -> nn.Module:
    """With nothing chosen; the noise is the operating system's."""
    loader = DataLoader(task.private, batch_size=256)
    return ExpMQuadEngine().make_private_expm(task.model, loader, epsilon, delta=DELTA)


def rival(task: tasks.Task, epsilon: float, seed: int, learning_rate: float) -> nn.Module:
    """Opacus DP-SGD with a learning rate."""
    return dp_sgd(
        folded(task.model),
        task.private,
        task.criterion,
        epsilon=epsilon,
        delta=DELTA,
        learning_rate=learning_rate,
        max_grad_norm=1.0,
        batch_size=len(task.private) // 20,
        epochs=10,
        seed=seed,
    )


def runs(name: str, epsilons: Sequence[float], seed: int, log: Path) -> Iterator[dict[str, object]]:
    """Every method on one task that is not in the log yet: its score before and after, and its seconds."""
    done = [{key: run[key] for key in ("task", "epsilon", "method", "seed")} for run in logged(log)]
    task = TASKS[name](seed)
    methods: dict[str, Callable[[tasks.Task, float, int], nn.Module]] = {"ours": ours}
    for rate in RATES:
        methods[f"dp-sgd, learning rate {rate:g}"] = partial(rival, learning_rate=rate)
    before = task.score(task.model)
    for epsilon in epsilons:
        for method, make in methods.items():
            cell = {"task": name, "epsilon": epsilon, "method": method, "seed": seed}
            if cell in done:
                continue
            start = time.process_time()
            model = make(task, epsilon, seed)
            seconds = time.process_time() - start
            scores = {"before": round(before, 2), "after": round(task.score(model), 2)}
            yield {**cell, **scores, "seconds": round(seconds, 1)}


def logged(log: Path) -> list[dict[str, Any]]:
    """The runs in a log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def table(log: Path) -> str:
    """Means over the runs in a log, as Markdown."""
    found, rows = logged(log), []
    for key in dict.fromkeys((run["task"], run["epsilon"], run["method"]) for run in found):
        own = [run for run in found if (run["task"], run["epsilon"], run["method"]) == key]
        before, after, seconds = (statistics.mean(run[name] for run in own) for name in ("before", "after", "seconds"))
        cells = (key[0], f"{key[1]:g}", key[2], f"{before:.1f}", f"{after:.1f}", f"{seconds:.0f}", str(len(own)))
        rows.append(cells)
    return markdown(("task", "ε", "method", "before", "after", "seconds", "runs"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.newcomers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("tasks", nargs="*", help=f"all by default: {', '.join(TASKS)}")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--log",
        type=Path,
        required=True,
        help="file of the runs, one JSON object a line; what is there is not run again",
    )
    parser.add_argument("--report", action="store_true", help="run nothing; print the table")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.tasks) - set(TASKS)):
        parser.error(f"tasks must be among {', '.join(TASKS)}, got {', '.join(unknown)}")
    for name in () if options.report else options.tasks or TASKS:
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
            for facts in runs(name, options.epsilon, seed, options.log):
                print(facts, flush=True)
                with options.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts) + "\n")
    print(table(options.log))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
