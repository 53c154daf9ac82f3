"""A loop without a radius: its batches are Poisson samples, its epochs the passes, and its end the engine's own release."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import quick
import torch
from loops import BATCH, FEATURES, RECORDS, flat, make_loader, make_model, make_sampled
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import ExpMQuadEngine, learned
from opacus_expm.accounting.filters import BudgetExceeded
from opacus_expm.gathering import looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.rows import GradSampling
from opacus_expm.learned import LearnedRounds, Walk
from opacus_expm.rule import Rule
from opacus_expm.subspaces import Sparse

STEPS = 42  # of the public rule for two layers

pytestmark = pytest.mark.filterwarnings("ignore:with 2. records:UserWarning")


def reference(epochs, model=None, loader=None, epsilon=1.0, seed=0, **measured):
    """The same learned rounds without a loop, and their ledger."""
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(seed))
    measurement = Measurement(Sparse(seed=0), None, nn.CrossEntropyLoss(), progress=False, **measured)
    loader = make_loader() if loader is None else loader
    rounds = LearnedRounds(loader, measurement, epsilon, 1e-5, engine.books(), epochs=epochs)
    return rounds.run(make_model() if model is None else model), engine


def many(records=200):
    """So many records that no sample is empty; a record's inputs tell which one it is."""
    x = torch.arange(records * 1.0)[:, None].repeat(1, FEATURES) / records
    return DataLoader(TensorDataset(x, torch.arange(records) % 3), batch_size=16)


def without(monkeypatch, *numbers):
    """Samples of which those with these numbers, from 1, have no records."""
    plain, calls = learned.sampled, []

    def sometimes(loader, rate, random, *, whole):
        calls.append(whole)
        found = plain(loader, rate, random, whole=whole)
        return None if len(calls) in numbers else found

    monkeypatch.setattr(learned, "sampled", sometimes)


def queries(loop):
    return [event.what for event in loop.engine.accountant.releases]


# --- what is released -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", quick.only([5], [1, 4, 5, 17]))
def test_a_loop_releases_what_its_rounds_do(epochs):
    loop = make_sampled(epochs=epochs, target_epsilon=20.0)  # with less, 20 records say nothing and the start is kept
    for _ in range(epochs):
        loop.epoch()
    expected, engine = reference(epochs, epsilon=20.0)
    assert torch.equal(flat(loop.module), flat(expected))
    assert loop.engine.accountant.releases == engine.accountant.releases
    assert not torch.allclose(flat(loop.module), flat(make_model()), rtol=0, atol=1e-5)


def line():
    """A model of one layer, for which the rule takes five directions over all records, in a loop or not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(FEATURES, 3)


def test_five_epochs_release_what_one_call_does():
    loop = make_sampled(model=line(), epochs=5)
    for _ in range(5):
        loop.epoch()
    engine = ExpMQuadEngine(noise_generator=np.random.default_rng(0))
    expected = engine.make_private_expm(line(), make_loader(), 1.0, delta=1e-5, criterion=nn.CrossEntropyLoss())
    assert torch.equal(flat(loop.module), flat(expected))
    assert loop.engine.accountant.releases == engine.accountant.releases
    with pytest.warns(UserWarning, match="noise_generator"):
        assert 0.97 < loop.engine.get_epsilon(1e-5) <= 1


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_more_epochs_than_steps_take_all_records(layers):
    """And go as far together: the time of a rule does not depend on the epochs."""
    plain = Rule(0.1, 1e-5, 500, layers, bounded=True, head=layers == 1)
    for epochs in (plain.steps, 2 * plain.steps, 7 * plain.steps):
        rule = replace(plain, epochs=epochs)
        assert (rule.steps, rule.sample_rate) == (epochs, 1.0)
        assert (rule.head_time, rule.time(1.0, 1.0, 2.0, 5.0)) == (plain.head_time, plain.time(1.0, 1.0, 2.0, 5.0))
    few = replace(plain, epochs=2)
    assert (few.steps, few.sample_rate) == (plain.steps, 2 / plain.steps)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("size", quick.only([None], [None, 3]))
def test_workers_change_nothing(size):
    """Neither in a loop nor without one; noise from a torch generator has a stream of its own for samples."""
    found = []
    for workers in (0, 2):
        options = {"loader": make_loader(num_workers=workers), "max_physical_batch_size": size}
        loop = make_sampled(
            ExpMQuadEngine(), epochs=5, target_epsilon=20.0, seed=torch.Generator().manual_seed(0), **options
        )
        for _ in range(5):
            loop.epoch()
        found.append(flat(loop.module))
    assert torch.equal(*found)


CASES = {
    "small pieces": {"max_physical_batch_size": 3},
    "functorch": {"grad_sample_mode": "functorch"},
    "a nominal size": {"nominal_size": 25},
}


@pytest.mark.parametrize("name", quick.only(["small pieces"], CASES))
def test_options_are_those_of_the_rounds(name):
    loop = make_sampled(epochs=5, **CASES[name])
    for _ in range(5):
        loop.epoch()
    changes = dict(CASES[name])
    mode = changes.pop("grad_sample_mode", None)
    expected, _ = reference(5, **changes, grad_sampling=GradSampling(mode))
    assert torch.equal(flat(loop.module), flat(expected))


def test_a_loop_in_secure_mode():
    engine = ExpMQuadEngine(secure_mode=True)
    loop = make_sampled(engine, target_epsilon=15.0)
    for _ in range(5):
        loop.epoch()
    held = {q.what: q.failure_probability for q in engine.accountant.releases}
    assert min(held["metric"], held["directions"]) > 0 == held["bound"]
    assert 14.5 < engine.get_epsilon(1e-5) <= 15
    assert not torch.equal(flat(loop.module), flat(make_model()))


def test_views_in_a_loop_are_those_of_its_rounds():
    views = {"views": lambda x: [x, x.flip(1)]}
    loop = make_sampled(target_epsilon=20.0, **views)
    for _ in range(5):
        loop.epoch()
    expected, plain = (reference(5, epsilon=20.0, **given)[0] for given in (views, {}))
    assert torch.equal(flat(loop.module), flat(expected))
    assert not torch.allclose(flat(loop.module), flat(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", quick.only([4], [1, 3, 4, 16]))
def test_how_many_records_are_seen_at_a_time_changes_rounding_alone(size):
    whole, cut = make_sampled(target_epsilon=20.0), make_sampled(target_epsilon=20.0, max_physical_batch_size=size)
    for _ in range(5):
        whole.epoch()
        cut.epoch()
    moved = (flat(whole.module) - flat(make_model())).abs().max()
    assert moved > 0.1
    assert (flat(cut.module) - flat(whole.module)).abs().max() < 1e-4 * moved
    assert cut.engine.accountant.releases == whole.engine.accountant.releases


SPREAD = [(1, [42]), (4, [10, 11, 10, 11]), (42, [1] * 42), (50, [1] * 50)]


@pytest.mark.parametrize(("epochs", "sizes"), quick.only(SPREAD[1::2], SPREAD))
def test_steps_are_spread_over_the_epochs(epochs, sizes):
    loop = make_sampled(epochs=epochs, loader=many(2000))
    assert len(loop.loader) == max(sizes)
    found = [sum(1 for x, y in loop.loader if loop.batch(x, y) is None) for _ in range(epochs)]
    run = next(event.run for event in loop.engine.accountant.releases if event.what == "directions")
    assert run[1:] == (min(1.0, epochs / STEPS), max(epochs, STEPS))
    assert found == sizes


def test_batches_are_poisson_samples():
    records = 200
    loop = make_sampled(loader=many(records), epochs=4)
    taken = np.zeros((0, records))
    for _ in range(4):
        for inputs, y in loop.loader:
            row = np.zeros((1, records))
            row[0, (inputs[:, 0] * records).round().long().numpy()] = 1
            assert row.sum() == len(y)  # none twice
            taken = np.concatenate([taken, row])
            loop.batch(inputs, y)
    assert len(taken) == STEPS
    rate = 4 / STEPS
    deviation = (rate * (1 - rate) * taken.size) ** 0.5
    assert abs(taken.sum() - rate * taken.size) < 4 * deviation
    assert abs(taken.sum() - 1.3 * rate * taken.size) > 4 * deviation  # another rate would be seen
    assert len({len(np.flatnonzero(row)) for row in taken}) > 5  # sizes differ


def test_weights_on_the_way_are_places_of_the_walk():
    loop, seen = make_sampled(epochs=5), [flat(make_model())]
    for _ in range(5):
        for x, y in loop.loader:
            assert torch.equal(flat(loop.module), seen[-1])
            loop.batch(x, y)
            assert not torch.equal(flat(loop.module), seen[-1])
            seen.append(flat(loop.module))
    assert "forward" not in vars(loop.module)


def test_a_sample_without_records_is_never_given(monkeypatch):
    without(monkeypatch, 2, STEPS)
    loop, sizes = make_sampled(epochs=5), []
    for _ in range(5):
        for x, y in loop.loader:
            sizes.append(len(x))
            loop.batch(x, y)
    assert len(sizes) == STEPS - 2
    assert min(sizes) > 0
    assert queries(loop)[-1] == "choice"  # the last sample was empty, and the run is complete all the same
    monkeypatch.undo()
    without(monkeypatch, 2, STEPS)
    assert torch.equal(flat(loop.module), flat(reference(5)[0]))


def test_batches_are_of_the_kind_that_the_loader_has():
    x, y = make_loader().dataset.tensors

    def collate(records):
        return {"input": torch.stack([r[0] for r in records]), "labels": torch.stack([r[1] for r in records])}

    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, collate_fn=collate)
    loop = make_sampled(epochs=5, loader=loader)
    for _ in range(5):
        for batch in loop.loader:
            loop.batch(batch["input"], batch["labels"])
    assert queries(loop)[-1] == "choice"


# --- what is charged, and when ----------------------------------------------------------------------------------------


def test_nothing_is_charged_before_the_first_batch():
    loop = make_sampled()
    assert len(loop.loader) == 9
    loop.module.eval()
    with torch.no_grad():
        for x, _ in loop.loader:
            loop.module(x)
    loop.module.train()
    iterator = iter(loop.loader)
    assert queries(loop) == []
    x, y = next(iterator)
    assert queries(loop)[-1] == "directions"
    loop.batch(x, y)
    assert queries(loop)[-1] == "directions"  # all of them at once
    with pytest.warns(UserWarning, match="left before its end"):
        iterator.close()


def test_a_loop_that_does_not_fit_is_refused_at_once():
    engine = ExpMQuadEngine(budget=(0.5, 1e-5))
    model = make_model()
    with pytest.raises(BudgetExceeded):
        make_sampled(engine, model)
    assert engine.accountant.releases == []
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_a_loop_fits_its_budget_and_takes_the_place_of_an_unfinished_one():
    engine = ExpMQuadEngine(budget=(1.0, 1e-5))
    model = make_model()
    first = make_sampled(engine, model)
    loop = make_sampled(engine, model)
    for _ in range(5):
        loop.epoch()
    assert engine.get_epsilon(1e-5) <= 1
    with pytest.raises(RuntimeError, match="called again for this module"):
        first.optimizer.step()
    with pytest.raises(BudgetExceeded):
        make_sampled(engine, model)


@pytest.mark.slow
def test_the_run_is_reserved_from_its_first_batch():
    engine = ExpMQuadEngine(budget=(1.0, 1e-5))
    loop = make_sampled(engine)
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    with pytest.raises(BudgetExceeded):
        engine.make_private_expm(
            make_model(),
            make_loader(),
            0.5,
            0.3,
            4,
            max_grad_norm=1.0,
            max_curvature=0.0,
            criterion=nn.CrossEntropyLoss(),
        )
    for x, y in iterator:
        loop.batch(x, y)
    for _ in range(4):
        loop.epoch()
    assert queries(loop)[-1] == "choice"


# --- wrong uses -------------------------------------------------------------------------------------------------------


def skips(loop, x, y):
    pass


def forgets_the_step(loop, x, y):
    loop.criterion(loop.module(x), y).backward()


def steps_without_backward(loop, x, y):
    loop.optimizer.step()


def counts_twice(loop, x, y):
    loss = loop.criterion(loop.module(x), y)
    loss.backward()
    loss.backward()


def counts_after_the_step(loop, x, y):
    loss = loop.criterion(loop.module(x), y)
    loss.backward()
    loop.optimizer.step()
    loss.backward()


def steps_twice(loop, x, y):
    loop.batch(x, y)
    loop.optimizer.step()


def shifts_inputs(loop, x, y):
    loop.batch(x + 1, y)


def changes_inputs_in_place(loop, x, y):
    loss = loop.criterion(loop.module(x), y)
    x.mul_(2)
    loss.backward()


def takes_a_part(loop, x, y):
    loop.batch(x[:1], y[:1])


def takes_other_records(loop, x, y):
    loop.batch(*next(iter(make_loader(seed=1))))


WRONG = [
    (skips, r"left without loss\.backward\(\) and optimizer\.step\(\)", False),
    (forgets_the_step, r"left without loss\.backward\(\) and optimizer\.step\(\)", False),
    (steps_without_backward, r"optimizer\.step\(\) without loss\.backward\(\)", False),
    (counts_twice, "called twice for one batch", False),
    (counts_after_the_step, "is drawn and its batch over", True),
    (steps_twice, "is drawn and its batch over", True),
    (shifts_inputs, "inputs that are not those of the batch", False),
    (changes_inputs_in_place, "changed in place", False),
    (takes_a_part, "inputs that are not those of the batch", False),
    (takes_other_records, "inputs that are not those of the batch", False),
]


@pytest.mark.parametrize(
    ("wrong", "words", "drawn"), quick.only(WRONG[:6], WRONG), ids=lambda v: getattr(v, "__name__", "")
)
def test_a_wrong_use_loses_one_sample_and_no_more(wrong, words, drawn, monkeypatch):
    """The sample counts as one without records; the run goes on, is charged as planned, and ends with its choice."""
    loop = make_sampled(epochs=5, seed=3)  # its second sample has several records
    loop.module.train()
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    before = flat(loop.module)
    with pytest.raises(RuntimeError, match=words):  # noqa: PT012  # the error may come with the next batch
        wrong(loop, *next(iterator))
        next(iterator)
    assert torch.equal(flat(loop.module), before) is not drawn
    if drawn:  # the error was told, and the epoch goes on
        for x, y in iterator:
            loop.batch(x, y)
    del iterator
    for _ in range(4 if drawn else 5):
        loop.epoch()
    if not drawn:
        without(monkeypatch, 2)
    expected, engine = reference(5, seed=3)
    assert torch.equal(flat(loop.module), flat(expected))
    assert loop.engine.accountant.releases == engine.accountant.releases
    assert "forward" not in vars(loop.module)


def test_parameters_must_not_change_after_the_first_batch():
    loop = make_sampled(epochs=5)
    loop.epoch()
    kept = copy.deepcopy(loop.module.state_dict())
    with torch.no_grad():
        loop.module[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed or frozen after the first batch"):
        loop.epoch()
    loop.module.load_state_dict(kept)
    for _ in range(4):
        loop.epoch()
    assert queries(loop)[-1] == "choice"


def test_parameters_may_change_before_the_first_batch():
    loop = make_sampled(epochs=5)
    loop.module.load_state_dict(make_model(seed=4).state_dict())
    for _ in range(5):
        loop.epoch()
    assert torch.equal(flat(loop.module), flat(reference(5, make_model(seed=4))[0]))


def leaves(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        break


def test_an_epoch_that_is_left_goes_on():
    loop = make_sampled(epochs=5)
    with pytest.warns(UserWarning, match="another epoch goes on from here"):
        leaves(loop)
    for _ in range(5):
        loop.epoch()
    assert torch.equal(flat(loop.module), flat(reference(5)[0]))  # nothing was lost


def test_a_sample_that_is_left_is_lost(monkeypatch):
    loop = make_sampled(epochs=5)
    with pytest.warns(UserWarning, match="left before its end"):
        next(iter(loop.loader))
    assert torch.equal(flat(loop.module), flat(make_model()))
    for _ in range(5):
        loop.epoch()
    without(monkeypatch, 1)
    assert torch.equal(flat(loop.module), flat(reference(5)[0]))


def test_an_older_iterator_is_over_when_a_new_one_begins():
    loop = make_sampled(epochs=5)
    older = iter(loop.loader)
    loop.criterion(loop.module((first := next(older))[0]), first[1]).backward()
    newer = iter(loop.loader)
    loop.batch(*next(newer))
    with pytest.raises(RuntimeError, match="Another iteration"):
        next(older)
    for x, y in newer:
        loop.batch(x, y)


def test_a_batch_in_evaluation_mode_cannot_be_counted():
    loop = make_sampled(epochs=5)
    loop.module.eval()
    seen = 0
    for x, y in loop.loader:
        with pytest.raises(RuntimeError, match=r"call module\.train\(\) first"):
            loop.criterion(loop.module(x), y).backward()
        seen += len(x)
    assert seen == RECORDS  # every record once
    assert len(loop.loader) == 3
    assert queries(loop) == []


def test_after_the_last_sample_the_module_is_ordinary():
    loop = make_sampled(epochs=1)
    loop.epoch()
    assert "forward" not in vars(loop.module)
    assert sum(len(x) for x, _ in loop.loader) == RECORDS
    with pytest.raises(RuntimeError, match=f"All {STEPS} rounds of make_private_with_epsilon are drawn"):
        loop.optimizer.step()


def test_what_fails_before_the_first_sample_ends_the_run(monkeypatch):
    loop = make_sampled()
    monkeypatch.setattr(looks, "gradient_norms", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.epoch()
    assert queries(loop) == ["metric", "scale"]  # stays charged
    with pytest.raises(RuntimeError, match="what was charged stays charged"):
        loop.optimizer.step()
    assert torch.equal(flat(loop.module), flat(make_model()))
    assert "forward" not in vars(loop.module)


def test_a_failed_draw_ends_the_run_at_the_last_place(monkeypatch):
    loop = make_sampled(epochs=5)
    loop.epoch()
    place = flat(loop.module)
    monkeypatch.setattr(Walk, "here", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.epoch()
    assert torch.equal(flat(loop.module), place)
    with pytest.raises(RuntimeError, match="The draw of round 9 failed"):
        loop.optimizer.step()


def test_copies_and_pickles_are_ordinary_modules():
    loop = make_sampled(epochs=5)
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    for duplicate in (copy.deepcopy(loop.module), pickle.loads(pickle.dumps(loop.module))):
        x = torch.randn(2, FEATURES)
        assert duplicate(x).requires_grad
        assert torch.equal(flat(duplicate), flat(loop.module))
    for x, y in iterator:
        loop.batch(x, y)


REFUSED = [
    ({"target_delta": 0.0}, ValueError, "target_delta must be greater than 0 where no radius is given"),
    ({"proj_dim": 3}, ValueError, "proj_dim has no meaning without radius="),
    ({"max_curvature": 1.0}, ValueError, "max_curvature has no meaning without radius="),
    ({"regularization": 1.0}, ValueError, "regularization has no meaning without radius="),
    ({"public_loader": make_loader(seed=1)}, ValueError, "public_loader has no meaning without radius="),
    ({"projection": "stiefel"}, ValueError, "projection has no meaning without radius="),
    ({"poisson_sampling": False}, ValueError, "every batch is a Poisson sample"),
    ({"epochs": 0}, ValueError, "epochs must be a positive integer"),
    ({"target_epsilon": 0.0}, ValueError, "target_epsilon must be greater than 0"),
    ({"engine": ExpMQuadEngine(adjacency="replace_one")}, ValueError, "adjacency='add_remove'"),
]


@pytest.mark.parametrize(
    ("changes", "error", "words"), REFUSED, ids=lambda v: "-".join(v) if isinstance(v, dict) else ""
)
def test_bad_arguments_leave_no_trace(changes, error, words):
    changes = dict(changes)
    engine, model = changes.pop("engine", ExpMQuadEngine()), make_model()
    with pytest.raises(error, match=words):
        make_sampled(engine, model, **changes)
    assert engine.accountant.releases == []
    assert "forward" not in vars(model)


def test_arguments_that_opacus_asks_for_play_no_part():
    loop = make_sampled(epochs=5, max_grad_norm=1.0, poisson_sampling=True, clipping="flat", grad_sample_mode="ghost")
    for _ in range(5):
        loop.epoch()
    assert torch.equal(flat(loop.module), flat(reference(5)[0]))


@pytest.mark.parametrize("size", quick.only([4], [1, 4, 100]))
def test_a_memory_manager_cuts_samples_and_changes_nothing(size):
    plain, managed = make_sampled(), make_sampled()
    for _ in range(5):
        plain.epoch()
        managed.module.train()
        with BatchMemoryManager(
            data_loader=managed.loader, max_physical_batch_size=size, optimizer=managed.optimizer
        ) as loader:
            assert len(loader) >= len(managed.loader)
            for x, y in loader:
                assert 1 <= len(x) <= size
                managed.batch(x, y)
    assert torch.equal(flat(managed.module), flat(plain.module))
    assert managed.engine.accountant.releases == plain.engine.accountant.releases


def test_a_piece_that_is_not_counted_loses_its_sample():
    loop = make_sampled(epochs=STEPS)  # samples of all records
    loop.module.train()
    manager = BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=4, optimizer=loop.optimizer)
    with manager as loader:
        with pytest.raises(RuntimeError, match=r"A batch was left without loss\.backward\(\), but every record"):
            list(loader)
        next(iterator := iter(loader))
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) without loss\.backward\(\)"):
            loop.optimizer.step()
        del iterator
        assert [len(x) for x, y in loader if loop.batch(x, y) is None] == [4] * 5
    assert loop.loader._training._number == 3  # the two that were lost, and one
