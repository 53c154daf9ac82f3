"""Two ranks (gloo) share a pass: the same sums as one, one charge, one model; a failure on one fails both, uncharged.

The ranks are processes of their own (``ranks_job.py``) that write down what they saw.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks_job as job
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import DataLoader, SequentialSampler, Subset, SubsetRandomSampler

from opacus_expm import ExpMQuadEngine
from opacus_expm.gathering import loaders
from opacus_expm.gathering.model import unwrap
from opacus_expm.gathering.ranks import Ranks
from opacus_expm.mechanism.quantiles import GRID, grid_counts

RANKS = 2
TOGETHER = (
    "gather",
    "released",
    "wrapped",
    "public",
    "other_machine",
    "mismatches",
    "raises",
    "budget",
    "resumed",
    "augmented",
    "alone",
    "killed",  # ends rank 1, so it comes last
)


def run_job(directory, *scenarios):
    """Exit codes of the ranks, once all have ended."""
    script = [sys.executable, str(Path(job.__file__))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*script, str(rank), str(RANKS), str(directory), *scenarios], env=environment)
        for rank in range(RANKS)
    ]
    try:
        return [process.wait(timeout=900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Scenario → what each rank saw; and where."""
    directory = tmp_path_factory.mktemp("ranks")
    found = {"codes": run_job(directory, *TOGETHER), "directory": directory}
    for scenario in TOGETHER:
        files = (directory / f"{scenario}.{rank}" for rank in range(RANKS))
        found[scenario] = [torch.load(file) for file in files if file.exists()]
    return found


def alone(**changes):
    return ExpMQuadEngine().gather(job.make_model(), job.loader(), job.DIM, **job.GOOD | changes)


def close(first, second):
    """Equal up to float64 rounding of a sum of a few dozen records."""
    return torch.allclose(first, second, rtol=1e-14, atol=1e-13)


@pytest.mark.slow
def test_two_ranks_give_the_sums_of_one_on_a_size_that_does_not_divide(seen):
    one, (first, second) = alone().sums, seen["gather"]
    assert job.RECORDS % RANKS != 0
    for name in ("gradient", "curvature"):
        assert torch.equal(first[name], second[name])
        assert close(first[name], getattr(one, name))
    # One record twice, which is what padding would do, or one left out, would be seen.
    short = job.loader(Subset(job.Records(), range(job.RECORDS - 1)))
    without = ExpMQuadEngine().gather(job.make_model(), short, job.DIM, **job.GOOD).sums
    assert not close(first["gradient"], without.gradient)
    assert not close(first["gradient"], 2 * one.gradient - without.gradient)


@pytest.mark.slow
def test_every_record_is_visited_once_on_one_rank(seen):
    first, second = (set(found["visited"]) for found in seen["gather"])
    assert len(seen["gather"][0]["visited"]) == len(first) == 21
    assert len(seen["gather"][1]["visited"]) == len(second) == 20
    assert first | second == set(range(job.RECORDS))


@pytest.mark.slow
def test_only_sums_and_one_count_cross_the_network(seen):
    """Besides words of success (one integer each) and digests of public facts (32 bytes each)."""
    for found in seen["gather"]:
        traffic = found["traffic"]
        assert set(traffic) == {"torch.float64", "torch.int64", "torch.uint8"}
        assert traffic["torch.float64"] == job.DIM + job.DIM * (job.DIM + 1) // 2 + 1
        assert traffic["torch.int64"] < 10
        assert traffic["torch.uint8"] % 32 == 0
        assert traffic["torch.uint8"] <= 32 * 32
        assert "hidden" in found["repr"]


@pytest.mark.slow
def test_one_rank_charges_and_draws_and_all_get_the_model(seen):
    first, second = seen["released"]
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["again"], second["again"])
    assert not torch.equal(first["weights"], first["again"])
    assert first["type"] == second["type"] == "Sequential"
    assert first["epsilon"] == second["epsilon"] == 0.75
    header, *entries = map(json.loads, (seen["directory"] / "ledger.jsonl").read_text().splitlines())
    assert "format" in header
    assert [entry["release"]["epsilon"] for entry in entries] == [0.5, 0.25]
    # The draw is the one that a process alone would make with the same noise.
    reference = ExpMQuadEngine(noise_generator=job.generator()).release(alone(), 0.5, 0.3)
    assert torch.allclose(first["weights"], job.flat(reference), rtol=0, atol=1e-12)
    assert not torch.allclose(first["again"], job.flat(reference), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "dpddp"])
def test_rounds_with_bought_bounds_on_wrapped_models(seen, wrapper):
    first, second = (found[wrapper] for found in seen["wrapped"])
    assert torch.equal(first["weights"], second["weights"])
    assert first["type"] == "Sequential"
    assert first["ledger"] == second["ledger"]
    assert first["epsilon"] == second["epsilon"] <= 2.0
    assert [entry.get("bound") for entry in first["ledger"]] == ["max_grad_norm", "max_curvature", None, None]
    drawn = first["ledger"][2]
    for bound in ("max_grad_norm", "max_curvature"):
        assert drawn[bound] in GRID


def test_counts_of_parts_are_the_counts_of_the_whole():
    """What ranks add up to buy a bound."""
    norms = np.random.default_rng(0).lognormal(size=101)
    assert np.array_equal(grid_counts(norms[::2]) + grid_counts(norms[1::2]), grid_counts(norms))


@pytest.mark.slow
def test_public_data_serves_ranks_that_shuffle_it_apart(seen):
    first, second = seen["public"]
    assert torch.equal(first["weights"], second["weights"])
    assert first["ledger"] == second["ledger"]
    assert first["bound"] == second["bound"]


@pytest.mark.slow
def test_ranks_that_round_differently_end_with_the_leading_ranks_model(seen):
    first, second = seen["other_machine"]
    assert torch.equal(first["weights"], second["weights"])


SAME = "must be the same on every rank"
REFUSALS = {
    "model": f"model {SAME}",
    "seed": f"projection {SAME}",
    "bound": f"max_grad_norm {SAME}",
    "size": f"loader {SAME}",
    "criterion": f"criterion {SAME}",
    "sharded sampler": "DistributedSampler with 2 replicas",
    "iterable": "cannot be divided between ranks",
    "too few": "fewer records than there are ranks",
    "dimension": f"proj_dim {SAME}",
    "sharded model": "is sharded over ranks (FSDP2",
    "loop": "make_private_expm(..., rounds=...) on every rank",
    "epsilon": f"epsilon {SAME}",
    "ledger": f"the ledger {SAME}",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSALS)
def test_what_differs_or_cannot_be_shared_is_refused_on_every_rank(seen, case):
    for found in seen["mismatches"]:
        assert found[case].startswith("ValueError: ")
        assert REFUSALS[case] in found[case]
        assert str(job.RECORDS) not in found[case]
        assert found["charged"] == 0


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_alone_fails_on_both(seen):
    """Checked where the others hear of it: else they would wait for that rank's next call, and take it for this one."""
    first, second = (found["one-sided"] for found in seen["mismatches"])
    assert len(first) == len(second) == 3
    for message in first:
        assert message.startswith("RankFailed: rank 1 failed")
    for message, name in zip(second, ("max_grad_norm", "radius", "epsilon"), strict=True):
        assert re.match(rf"(Type|Value)Error: {name} must be ", message)


@pytest.mark.slow
def test_a_rank_that_raises_fails_both_and_charges_nothing(seen):
    first, second = seen["raises"]
    assert first["message"].startswith("RankFailed: rank 1 failed")
    assert "disk" not in first["message"]  # what went wrong there may be private
    assert second["message"] == "OSError: the disk of rank 1 is gone"
    assert first["charged"] == second["charged"] == 0
    assert first["charged later"] == second["charged later"] == 1


@pytest.mark.slow
def test_a_budget_is_kept_for_all_ranks(seen):
    first, second = seen["budget"]
    assert first["message"].startswith("BudgetExceeded: ")
    assert second["message"].startswith("RankFailed: rank 0 failed")
    for found in seen["budget"]:
        assert found["remaining"] == 0.25
        assert found["charged"] == 1


@pytest.mark.slow
def test_an_interrupted_pass_goes_on_where_each_rank_was(seen):
    first, second = seen["resumed"]
    for found in seen["resumed"]:
        assert found["files"] == ["pass.rank0of2", "pass.rank1of2"]
        assert found["files later"] == []
        for name in ("gradient", "curvature"):
            assert close(found[name], getattr(alone().sums, name))
    assert second["message"] == "OSError: interrupted"
    assert first["after"] == [0, 2, 4, 6]  # complete: a batch to see the shape of a record, and no pass
    assert second["before"] == list(range(1, 21, 2))  # two whole batches were kept
    assert second["after"] == list(range(17, job.RECORDS, 2))


@pytest.mark.slow
def test_every_rank_draws_randomness_of_its_own_for_its_records(seen):
    """A seed that all ranks share would give the records of one rank the noise of another's."""
    first, second = (found["noise"] for found in seen["augmented"])
    assert len({*first, *second}) == len(first) + len(second) == job.RECORDS * job.FEATURES
    assert all(found["left alone"] for found in seen["augmented"])


@pytest.mark.slow
def test_one_rank_may_work_alone(seen):
    assert close(seen["alone"][0]["gradient"], alone().sums.gradient)


@pytest.mark.slow
def test_a_rank_killed_in_the_pass_stops_the_other_and_nothing_is_charged(seen):
    assert seen["codes"] == [0, -signal.SIGKILL]
    [found] = seen["killed"]
    assert found["message"].startswith("RankFailed: rank 0 waited in vain")
    assert found["remaining"] == 1.0
    assert len(found["visited"]) == 21  # it was in the middle of a release that would have gone well
    assert len((seen["directory"] / "killed.jsonl").read_text().splitlines()) == 2  # the header and the budget


# --- Without processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_are_a_partition(ranks, shuffle):
    parts = [loaders.part_of(job.loader(shuffle=shuffle), rank=r, ranks=ranks) for r in range(ranks)]
    found = [[i for batch in part.batch_sampler for i in (part.dataset.indices[j] for j in batch)] for part in parts]
    assert sorted(i for part in found for i in part) == list(range(job.RECORDS))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    for part in parts:
        loaders.check_loader(part)


def test_a_record_more_moves_no_other():
    def part(size):
        return list(loaders.part_of(job.loader(job.Records(size)), rank=1, ranks=3).dataset.indices)

    assert part(20) == [1, 4, 7, 10, 13, 16, 19]
    assert part(21) == part(20)
    assert part(23) == [*part(20), 22]


def test_parts_of_a_subset_sampler_and_options_are_kept():
    def collate(records):
        return records

    loader = DataLoader(
        job.Records(),
        sampler=SubsetRandomSampler([5, 3, 9, 30]),
        batch_size=3,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    part = loaders.part_of(loader, rank=1, ranks=2)
    assert list(part.dataset.indices) == [3, 30]
    assert type(part.sampler) is SequentialSampler
    assert part.collate_fn is collate
    assert part.batch_size == 3
    assert part.generator is loader.generator
    assert list(loaders.part_of(loader, rank=0, ranks=2, start=1).dataset.indices) == [9]


def test_distributed_true_needs_a_process_group():
    with pytest.raises(ValueError, match="distributed=True needs torch"):
        ExpMQuadEngine(distributed=True).gather(job.make_model(), job.loader(), job.DIM, **job.GOOD)
    with pytest.raises(TypeError, match="distributed must be True, False or None, got 2"):
        ExpMQuadEngine(distributed=2)


def test_a_process_alone_is_its_own_answer():
    ranks, values = Ranks.current(None), torch.arange(3.0)
    assert (ranks.rank, ranks.count, ranks.leads) == (0, 1, True)
    assert ranks.summed(values) is ranks.from_leader(values) is values


def test_wrappers_are_taken_off():
    inner = nn.Linear(2, 1)
    assert unwrap(DataParallel(inner)) is inner
    assert unwrap(inner) is inner
