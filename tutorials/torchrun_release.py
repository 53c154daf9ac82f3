"""A private release whose pass is shared by the processes that ``torchrun`` starts.

    torchrun --nproc-per-node 2 tutorials/torchrun_release.py --out private.pt --ledger ledger.jsonl

Every process runs this whole file: each visits its own part of the private records, the first one charges the ledger and
draws, and all of them end with the same model. Without ``torchrun`` the file runs in one process, with the same result.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine


def records(count: int, shift: float, seed: int) -> TensorDataset:
    """A regression whose private version is shifted against the public one; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 1, generator=generator) - 2
    return TensorDataset(
        x, torch.sin(2 * x + shift) + 0.1 * torch.randn(count, 1, generator=generator)
    )


def pretrained(public: TensorDataset) -> nn.Module:
    """A small network fitted to the public records, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(public.tensors[0]), public.tensors[1]).backward()
        optimizer.step()
    return model


def main() -> None:
    """Release one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="where the private model's weights go")
    parser.add_argument("--ledger", help="append-only file of charges")
    parser.add_argument("--epsilon", type=float, default=1.0)
    arguments = parser.parse_args()

    if (
        "RANK" in os.environ
    ):  # started by torchrun; the timeout bounds how long a lost process is waited for
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    several = dist.is_initialized()

    public, private = records(500, shift=0.0, seed=1), records(2001, shift=0.4, seed=2)
    model = pretrained(public)
    engine = ExpMQuadEngine(ledger_path=arguments.ledger)
    released = engine.make_private_expm(
        DistributedDataParallel(model) if several else model,  # wrapped or not is the same here
        DataLoader(private, batch_size=64),  # over all records, on every rank
        epsilon=arguments.epsilon,
        radius=0.5,
        proj_dim=20,
        criterion=nn.MSELoss(),
        public_loader=DataLoader(public, batch_size=64),
    )
    if not several or dist.get_rank() == 0:
        torch.save(released.state_dict(), arguments.out)
        print(
            f"released with epsilon={engine.get_epsilon()} by {dist.get_world_size() if several else 1} process(es)"
        )
    if several:
        dist.barrier()  # no rank leaves while another one still writes
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
