"""Statistics gathered by Ray tasks, one for each shard of the data, merged, and released once.

    pip install "ray>=2.30" && python tutorials/ray_shards.py --shards 3 --out private.pt

A task sees its own shard only (a hospital's records, or one file of a large data set). What it leaves behind is a file of
clipped sums: **private data**, written by an explicit call to a directory that tasks and driver share, and deleted after
the merge. All parts use one public projection seed and the same public bounds. Ray decides what runs where, and runs a
failed task again; its file then takes the place of the earlier one, so that no shard counts twice.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import ray
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, Sparse, Statistics

SEED, PER_SHARD = 7, 401


def make_model() -> nn.Module:
    """The pretrained model, known to everybody."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def shard(number: int) -> TensorDataset:
    """The private records of one place; here made up."""
    x = torch.randn(PER_SHARD, 3, generator=torch.Generator().manual_seed(number))
    return TensorDataset(x, x.sum(1, keepdim=True))


@ray.remote(num_cpus=1)
def gather(number: int, path: str) -> None:
    """Where the shard is: one pass, one private file."""
    statistics = ExpMQuadEngine().gather(
        make_model(),
        DataLoader(shard(number), batch_size=64),
        proj_dim=10,
        criterion=nn.MSELoss(),
        max_grad_norm=2.0,
        max_curvature=4.0,
        projection=Sparse(seed=SEED),
    )
    Path(path).unlink(missing_ok=True)  # of a task that failed and is run again
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*writes PRIVATE data"
        )  # it does, to the directory named below
        statistics.save_private(path)


def main() -> None:
    """Gather in parallel, merge, release one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--out", required=True, help="where the private model's weights go")
    parser.add_argument("--cpus", type=int, help="for Ray; all by default")
    arguments = parser.parse_args()

    ray.init(num_cpus=arguments.cpus, include_dashboard=False)
    with tempfile.TemporaryDirectory(
        prefix="private-"
    ) as directory:  # only its owner may enter; gone at the end
        paths = [f"{directory}/shard-{number}.private" for number in range(arguments.shards)]
        ray.get([gather.remote(number, path) for number, path in enumerate(paths)])
        first, *others = (Statistics.load_private(path, make_model()) for path in paths)
    ray.shutdown()

    engine = ExpMQuadEngine()
    released = engine.release(first.merge(*others), epsilon=1.0, radius=0.5)
    torch.save(released.state_dict(), arguments.out)
    print(f"released with epsilon={engine.get_epsilon()} from {arguments.shards} shards")


if __name__ == "__main__":
    main()
