"""Samples that workers read ahead hold the records that were drawn, each once, whatever happened to those before."""

import multiprocessing
import random

import numpy as np
import pytest
import quick
import torch
from torch.utils.data import DataLoader, Dataset

from opacus_expm.gathering import loaders
from opacus_expm.gathering.randomness import Generators, freshly
from opacus_expm.gathering.samples import Samples, _Queue, sampled

RECORDS, BATCH, COUNT = 60, 4, 6

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")


class Numbered(Dataset):
    """Records that tell which they are, with a number that is drawn for each; the data set knows how many were read."""

    def __init__(self, ill=None):
        self.read, self.ill = multiprocessing.Semaphore(0), multiprocessing.Value("i", -1 if ill is None else ill)

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        self.read.release()
        if index == self.ill.value:
            raise KeyError(index)
        return torch.tensor([index, random.getrandbits(50)]), torch.tensor(0)


def seed_again(_worker):
    random.seed(0)


class Draws:
    """Samples that are drawn from a list, and what was drawn so far."""

    def __init__(self, loader, *, whole=False, rate=0.3, empty=()):
        self.loader, self.whole, self.rate, self.empty = loader, whole, rate, empty
        self.random, self.drawn = np.random.default_rng(0), []

    def __call__(self):
        found = sampled(self.loader, self.rate, self.random, whole=self.whole)
        found = None if len(self.drawn) in self.empty else found
        self.drawn.append([] if found is None else [int(i) for i in found.dataset.indices])
        return found


def made(workers=2, size=0, dataset=None, **options):
    loader = DataLoader(
        Numbered() if dataset is None else dataset, batch_size=BATCH, num_workers=workers, worker_init_fn=seed_again
    )
    draws = Draws(loader, **options)
    return Samples(loader, draws, "loader", size), draws


def names(batches):
    return [int(x) for batch, _ in batches for x in batch[:, 0]]


@pytest.fixture
def started(monkeypatch):
    """How many iterations had workers."""
    found, original = [], DataLoader._get_iterator
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda self: found.append(self.num_workers) or original(self))
    return found


CASES = [{"empty": (0, 2, 3, 5)}, {"whole": True, "size": 3}, {}, {"whole": True}, {"rate": 1.0}, {"rate": 0.03}]


@pytest.mark.parametrize("options", quick.only(CASES[:2], CASES), ids=str)
def test_samples_are_those_that_were_drawn_and_workers_start_once(started, options):
    samples, draws = made(**options)
    for number in range(COUNT):
        sample = samples.next(COUNT - number)
        if sample is None:
            assert draws.drawn[number] == []
            continue
        batches = list(freshly(sample))
        assert names(batches) == draws.drawn[number]
        assert len(batches) == len(sample)
        assert loaders.dataset_size(sample) == len(draws.drawn[number])
    assert len(draws.drawn) == COUNT  # and no more than will be asked for
    assert started == [2]


def test_the_next_samples_are_read_while_one_is_in_use():
    dataset = Numbered()
    samples, draws = made(dataset=dataset)
    list(samples.next(COUNT))
    for _ in range(len(draws.drawn[0]) + 1):
        assert dataset.read.acquire(timeout=60)
    assert len(draws.drawn) > 1


def test_without_workers_nothing_is_drawn_ahead(started):
    samples, draws = made(workers=0)
    for number in range(COUNT):
        sample = samples.next(COUNT - number)
        assert len(draws.drawn) == number + 1
        assert names(freshly(sample)) == draws.drawn[number]
    assert not any(started)


def test_a_sample_may_be_left_and_read_again(started):
    samples, draws = made()
    left = iter(samples.next(COUNT))
    next(left)
    again = samples.next(COUNT - 1)
    assert names(again) == names(again) == draws.drawn[1]
    assert names(left) == []  # no record of another sample
    unread = samples.next(COUNT - 2)
    assert names(samples.next(COUNT - 3)) == draws.drawn[3]
    assert names(unread) == []
    assert names(unread) == draws.drawn[2]
    assert len(started) == 5  # three of the samples' own, and two to read one again


def test_an_exception_loses_its_own_sample_alone():
    dataset = Numbered(ill=0)
    samples, draws = made(dataset=dataset, rate=1.0)
    with pytest.raises(KeyError):
        list(samples.next(COUNT))
    dataset.ill.value = -1
    for number in range(1, COUNT):
        assert names(samples.next(COUNT - number)) == draws.drawn[number]


class Interrupt(BaseException):
    """As a user's."""


@pytest.mark.parametrize("at", quick.only([3], range(5)))
@pytest.mark.parametrize(("holder", "name"), [(loaders, "each_alone"), (_Queue, "add")], ids=["cut", "queue"])
def test_an_interrupt_leaves_samples_and_batches_in_step(monkeypatch, holder, name, at):
    """Wherever the next sample is prepared."""
    samples, draws = made(rate=0.1)
    assert names(samples.next(9)) == draws.drawn[0]
    original, calls = getattr(holder, name), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == at + 1:
            raise Interrupt
        return original(*arguments)

    monkeypatch.setattr(holder, name, interrupted)
    found = []
    for remaining in range(8, 0, -1):
        try:
            sample = samples.next(remaining)
            found.append(names(sample) if sample is not None else [])
        except Interrupt:
            found.append(None)
    kept = [taken for taken in found if taken]
    assert None in found
    assert len(kept) > 3
    assert all(taken in draws.drawn for taken in kept)


def test_the_randomness_is_fresh_and_the_script_keeps_its_own():
    random.seed(0)
    torch.manual_seed(0)
    before, seen = Generators.of().states(), []
    samples, _ = made(rate=1.0)
    for number in range(COUNT):
        seen += [int(x) for batch, _ in freshly(samples.next(COUNT - number)) for x in batch[:, 1]]
    assert len(set(seen)) == len(seen) == COUNT * RECORDS
    assert not Generators.of().drawn_since(before)


def test_the_generator_of_the_draws_cannot_be_found_from_a_sample():
    """Fresh randomness for the records must not set it back: the same records would come again."""
    samples, draws = made()
    sample = samples.next(COUNT)
    assert draws.random.bit_generator not in Generators.of(sample).found
    with Generators.of(sample).refreshed():
        taken = names(sample)
    assert taken == draws.drawn[0]
    assert names(samples.next(COUNT - 1)) != taken
