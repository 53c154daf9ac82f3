"""One rank of a job of the tests of distributed work: ``python ranks_job.py rank ranks directory scenarios``.

Every scenario leaves what it saw in ``directory/scenario.rank``. No test is collected here.
"""

import copy
import datetime
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from opacus_expm import ExpMQuadEngine, Stiefel
from opacus_expm.gathering import files
from opacus_expm.gathering import statistics as statistics_module

RECORDS, FEATURES, DIM, BATCH = 41, 3, 5, 4
TIMEOUT = datetime.timedelta(seconds=120)


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class Records(Dataset):
    """Records that note which of them were visited, and may do something else instead."""

    def __init__(self, size=RECORDS, at=None, then=None):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True)
        self.visited, self.at, self.then = [], at, then

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.at:
            self.then()
        self.visited.append(index)
        return self.x[index], self.y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Records())


GOOD = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 1.0, "projection": Stiefel(seed=0)}


def loader(dataset=None, **options):
    return DataLoader(Records() if dataset is None else dataset, batch_size=BATCH, **options)


def generator():
    return torch.Generator().manual_seed(5)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def refusal(call):
    """Name and words of what a call raises, or "none"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Traffic:
    """Counts numbers handed to torch.distributed, by dtype, and keeps what crossed in float64."""

    NAMES = ("all_reduce", "all_gather", "broadcast")

    def __enter__(self):
        self.counts, self._originals = {}, {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(original))
        return self

    def _counting(self, original):
        def call(*args):
            tensor = next(a for a in args if isinstance(a, torch.Tensor))
            self.counts[str(tensor.dtype)] = self.counts.get(str(tensor.dtype), 0) + tensor.numel()
            return original(*args)

        return call

    def __exit__(self, *_):
        for name, original in self._originals.items():
            setattr(dist, name, original)


# --- Scenarios: each gives what the tests look at ------------------------------------------------------------------


def gather(rank, directory):
    """The sums, and what it took to get them."""
    dataset = Records()
    with Traffic() as traffic:
        found = ExpMQuadEngine().gather(make_model(), loader(dataset, shuffle=True), DIM, **GOOD)
    return {
        "gradient": found.sums.gradient,
        "curvature": found.sums.curvature,
        "visited": dataset.visited,
        "traffic": traffic.counts,
        "repr": repr(found),
    }


def released(rank, directory):
    """A release from gathered statistics: one line in a shared ledger, one model."""
    engine = ExpMQuadEngine(ledger_path=directory / "ledger.jsonl", noise_generator=generator())
    found = engine.gather(make_model(), loader(), DIM, **GOOD)
    model = engine.release(found, 0.5, 0.3)
    again = engine.release(found, 0.25, 0.3)
    return {
        "weights": flat(model),
        "again": flat(again),
        "type": type(model).__name__,
        "epsilon": engine.get_epsilon(),
    }


def wrapped(rank, directory):
    """Rounds with bought bounds and wrapped models; each rank has a noise of its own, of which one is used."""
    results = {}
    for name, wrap in {"ddp": DistributedDataParallel, "dpddp": DifferentiallyPrivateDistributedDataParallel}.items():
        engine = ExpMQuadEngine(secure_mode=name == "ddp")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a private bound")
            model = engine.make_private_expm(
                wrap(make_model()), loader(), 2.0, 0.3, DIM, rounds=2, criterion=nn.MSELoss()
            )
        results[name] = {
            "weights": flat(model),
            "type": type(model).__name__,
            "epsilon": engine.get_epsilon(1e-9),
            "ledger": engine.accountant.state_dict()["releases"],
        }
    return results


def public(rank, directory):
    """Bounds from public data that every rank shuffles in its own way."""
    engine = ExpMQuadEngine()
    torch.manual_seed(rank)
    model = engine.make_private_expm(
        make_model(),
        loader(),
        1.0,
        0.3,
        None,
        criterion=nn.MSELoss(),
        max_curvature=0.0,
        public_loader=loader(shuffle=True),
    )
    statistics = engine.gather(
        make_model(),
        loader(),
        None,
        criterion=nn.MSELoss(),
        max_curvature=0.0,
        public_loader=loader(shuffle=True),
    )
    return {
        "weights": flat(model),
        "ledger": engine.accountant.state_dict()["releases"],
        "bound": statistics.sums.max_grad_norm,
    }


def other_machine(rank, directory):
    """Rank 1 rounds the released weights differently."""
    engine = ExpMQuadEngine()
    original = statistics_module.Statistics.module_at

    def module_at(self, coordinates):
        module = original(self, coordinates)
        with torch.no_grad():
            module[0].bias.add_(1e-12 * rank)
        return module

    statistics_module.Statistics.module_at = module_at
    try:
        return {"weights": flat(engine.make_private_expm(make_model(), loader(), 1.0, 0.3, DIM, **GOOD))}
    finally:
        statistics_module.Statistics.module_at = original


def mismatches(rank, directory):
    """What differs between the ranks is refused by name, on both; what cannot be shared out as well."""
    engine = ExpMQuadEngine()
    other = make_model()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-9 * rank
    good_call = make_model(), loader()
    good = {"model": make_model(), "loader": loader(), "proj_dim": DIM, **GOOD}
    cases = {
        "model": {"model": other},
        "seed": {"projection": Stiefel(seed=rank)},
        "bound": {"max_grad_norm": 1.0 + rank},
        "size": {"loader": loader(Records(RECORDS + rank))},
        "criterion": {"criterion": nn.MSELoss(reduction="sum" if rank else "mean")},
        "sharded sampler": {"loader": loader(sampler=DistributedSampler(Records(), 2, rank))},
        "iterable": {"loader": loader(Stream()), "nominal_size": RECORDS},
        "too few": {"loader": loader(Records(1))},
        "dimension": {"proj_dim": DIM + rank},
        "sharded model": {"model": fully_shard(copy.deepcopy(make_model()).float())},
    }
    found = {name: refusal(lambda c=change: engine.gather(**{**good, **c})) for name, change in cases.items()}
    found["loop"] = refusal(
        lambda: engine.make_private_with_epsilon(
            module=make_model(),
            optimizer=None,
            data_loader=loader(),
            target_epsilon=1.0,
            target_delta=0.0,
            epochs=1,
            max_grad_norm=1.0,
            radius=0.3,
            proj_dim=DIM,
        )
    )
    statistics = engine.gather(**good)
    # What is wrong on one rank alone fails on both, and the next call finds them together.
    found["one-sided"] = [
        refusal(lambda: engine.gather(**{**good, "max_grad_norm": 1.0 - rank})),
        refusal(lambda: engine.make_private_expm(*good_call, 1.0, 0.3 if rank == 0 else -1.0, DIM, **GOOD)),
        refusal(lambda: engine.release(statistics, 1.0 if rank == 0 else "one", 0.3)),
    ]
    found["epsilon"] = refusal(lambda: engine.release(statistics, 1.0 + rank, 0.3))
    if rank == 1:
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    found["ledger"] = refusal(lambda: engine.release(statistics, 1.0, 0.3))
    found["charged"] = len(engine.accountant.releases)
    return found


def raises(rank, directory):
    """A record of rank 1 raises; afterwards the ranks work together as before."""

    def fail():
        raise OSError("the disk of rank 1 is gone")

    engine = ExpMQuadEngine()
    message = refusal(
        lambda: engine.make_private_expm(make_model(), loader(Records(at=7, then=fail)), 1.0, 0.3, DIM, **GOOD)
    )
    charged = len(engine.accountant.releases)
    engine.make_private_expm(make_model(), loader(), 1.0, 0.3, DIM, **GOOD)
    return {"message": message, "charged": charged, "charged later": len(engine.accountant.releases)}


def budget(rank, directory):
    """The budget is exceeded for everybody."""
    engine = ExpMQuadEngine(budget=(1.0, 0.0))
    statistics = engine.gather(make_model(), loader(), DIM, **GOOD)
    engine.release(statistics, 0.75, 0.3)
    return {
        "message": refusal(lambda: engine.release(statistics, 0.75, 0.3)),
        "remaining": engine.remaining(),
        "charged": len(engine.accountant.releases),
    }


def resumed(rank, directory):
    """A pass that fails on rank 1 goes on where each rank was."""

    def fail():
        raise OSError("interrupted")

    files.SECONDS = 0.0
    engine, interrupted, whole = ExpMQuadEngine(), Records(at=21, then=fail), Records()
    options = {**GOOD, "private_checkpoint": directory / "pass"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*PRIVATE")
        message = refusal(lambda: engine.gather(make_model(), loader(interrupted), DIM, **options))
        names = sorted(path.name for path in directory.glob("pass*"))
        dist.barrier()
        found = engine.gather(make_model(), loader(whole), DIM, **options)
    dist.barrier()
    return {
        "message": message,
        "files": names,
        "files later": [path.name for path in directory.glob("pass*")],
        "before": interrupted.visited,
        "after": whole.visited,
        "gradient": found.sums.gradient,
        "curvature": found.sums.curvature,
    }


class Noisy(Records):
    """Records with noise, which is noted."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = torch.rand(FEATURES, dtype=torch.float64)
        self.noise = [*getattr(self, "noise", []), *noise.tolist()]
        return x + noise, y


def augmented(rank, directory):
    """Noisy records, in a job that seeds every rank alike."""
    dataset, model = Noisy(), make_model()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ExpMQuadEngine().gather(model, loader(dataset), DIM, **GOOD)
    return {"noise": dataset.noise, "left alone": torch.equal(torch.get_rng_state(), before)}


def alone(rank, directory):
    """One rank works on its own, without the other."""
    if rank == 1:
        return {}
    found = ExpMQuadEngine(distributed=False).gather(make_model(), loader(), DIM, **GOOD)
    return {"gradient": found.sums.gradient}


def killed(rank, directory):
    """Rank 1 is killed in the pass."""
    engine = ExpMQuadEngine(ledger_path=directory / "killed.jsonl", budget=(1.0, 0.0))
    dataset = Records(at=21, then=lambda: os.kill(os.getpid(), signal.SIGKILL))
    message = refusal(lambda: engine.make_private_expm(make_model(), loader(dataset), 1.0, 0.3, DIM, **GOOD))
    return {"message": message, "remaining": engine.remaining(), "visited": dataset.visited}


if __name__ == "__main__":
    rank, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=count, timeout=TIMEOUT
    )
    for scenario in sys.argv[4:]:
        torch.save(globals()[scenario](rank, directory), directory / f"{scenario}.{rank}")
    if "killed" in sys.argv:
        os._exit(0)  # gloo's threads still wait for the dead rank, and may abort an orderly exit
    dist.destroy_process_group()
