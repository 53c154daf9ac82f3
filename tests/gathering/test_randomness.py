"""The randomness of the data is fresh in every pass, whatever the script has seeded, and the script's own goes on untouched.

That one record moves the sums by one record's worth is shown for records that keep their randomness, in
``audit/test_streams.py``.
"""

import functools
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from opacus_expm import ExpMQuadEngine, Sparse
from opacus_expm.gathering import loaders, randomness
from opacus_expm.gathering.randomness import FreshWorker, Generators

RECORDS, FEATURES = 12, 3
CPU = torch.device("cpu")
GLOBAL = {  # one number from each global generator
    "torch": lambda: float(torch.randn((), dtype=torch.float64)),
    "numpy": lambda: float(np.random.standard_normal()),
    "random": lambda: random.gauss(0.0, 1.0),
}
KINDS = {  # generators that a script may hold, and one number from each
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: float(torch.randn((), generator=g))),
    "numpy": (np.random.default_rng, lambda g: g.normal()),
    "numpy, Mersenne twister": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.normal()),
    "numpy, Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda g: g.normal()),
    "numpy, legacy": (np.random.RandomState, lambda g: g.normal()),
    "numpy, legacy around another": (lambda seed: np.random.RandomState(np.random.PCG64(seed)), lambda g: g.normal()),
    "random": (random.Random, lambda g: g.gauss(0.0, 1.0)),
}


def seed_everything():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def streams(*generators):
    """What every global generator, and each of those that are given, would draw next; nothing is changed."""
    found = Generators.of(*generators).found
    before = [randomness._state(g) for g in found]
    drawn = [draw() for draw in GLOBAL.values()]
    for generator in generators:
        own = np.random.Generator(generator) if isinstance(generator, np.random.BitGenerator) else generator
        drawn.append(KINDS[kind_of(own)][1](own))
    randomness._set_states(found, before)
    return drawn


def kind_of(generator):
    if isinstance(generator, torch.Generator):
        return "torch"
    return "random" if isinstance(generator, random.Random) else "numpy"


# --- Generators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_fresh_inside_and_goes_on_afterwards_as_if_nothing_had_been(kind):
    make, draw = KINDS[kind]
    held, twin = make(0), make(0)
    assert draw(held) == draw(twin)  # of a pair of normals, the second may be kept
    found, inside = Generators.of(held), []
    for _ in range(2):
        with found.refreshed():
            inside.append([draw(held) for _ in range(3)])
    seeded = [draw(twin) for _ in range(3)]
    assert len({*inside[0], *inside[1], *seeded}) == 9
    assert [draw(held) for _ in range(3)] == seeded


@pytest.mark.parametrize("name", GLOBAL)
def test_the_global_generators_are_fresh_inside_and_go_on_afterwards(name):
    seed_everything()
    GLOBAL[name]()
    expected = streams()
    with Generators.of().refreshed():
        first = GLOBAL[name]()
    seed_everything()
    GLOBAL[name]()
    with Generators.of().refreshed():
        second = GLOBAL[name]()
    assert first != second
    assert streams() == expected


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_states_come_back_after_errors_and_interrupts(error):
    held = [make(3) for make, _ in KINDS.values()]
    seed_everything()
    expected = streams(*held)
    found = Generators.of(held)

    def fail():
        with found.refreshed():
            assert streams(*held) != expected
            raise error

    with pytest.raises(error):
        fail()
    assert streams(*held) == expected


def test_states_come_back_when_the_entropy_fails(monkeypatch):
    held = random.Random(3)
    seed_everything()
    expected = streams(held)
    calls = iter(range(5))

    def failing(self, entropy):
        for generator in self.found:
            if next(calls) == 2:
                raise NotImplementedError  # as os.urandom does
            randomness._reseed(generator, random.Random(0).randbytes)

    monkeypatch.setattr(Generators, "reseed", failing)
    with pytest.raises(NotImplementedError), Generators.of(held).refreshed():
        pytest.fail("nothing may be drawn from what is not fresh")
    assert streams(held) == expected


def test_contexts_may_be_nested():
    seed_everything()
    expected = streams()
    found = Generators.of()
    with found.refreshed():
        outer = streams()
        with found.refreshed():
            inner = streams()
            for draw in GLOBAL.values():
                draw()
        assert streams() == outer
    assert streams() == expected
    assert len({*expected, *outer, *inner}) == 9


def test_torch_has_more_states_than_seeds():
    """A seed of torch's CPU generator has 32 bits that count: with its own seed, a fresh stream does not come back."""
    generator = torch.Generator()
    plain = [torch.rand(4, generator=generator.manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*plain)  # why
    Generators((generator,)).reseed()
    fresh = torch.rand(4, generator=generator)
    assert not torch.equal(torch.rand(4, generator=generator.manual_seed(generator.initial_seed())), fresh)
    # Every word of the state counts: with the same seed and first words, and others in the end.
    drawn = []
    for last in (b"\0", b"\1"):
        content = random.Random(1).randbytes(8 + 4 * 624)[:-1] + last
        parts = iter((content[:8], content[8:]))
        Generators((generator,)).reseed(lambda count, parts=parts: next(parts)[:count])
        drawn.append(torch.rand(2000, generator=generator, dtype=torch.float64))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("draw", ["uniform", "norm"])
def test_a_fresh_stream_of_torch_has_the_right_law(draw):
    """And a state without entropy is noticed by the same test."""

    def drawn(entropy):
        generator = torch.Generator()
        Generators((generator,)).reseed(entropy)
        function = torch.rand if draw == "uniform" else torch.randn
        return function(5000, generator=generator, dtype=torch.float64).numpy()

    assert stats.kstest(drawn(random.Random(7).randbytes), draw).pvalue > 1e-3
    assert stats.kstest(drawn(lambda count: b"\0" * (count - 1) + b"\1"), draw).pvalue < 1e-3


# --- Where generators are found ----------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)


class ByName:
    def __call__(self, x):
        return [x + RNG.normal() for _ in range(2)]


class OfTheClass:
    rng = RNG


class Slotted:
    __slots__ = ("empty", "rng")

    def __init__(self, rng):
        self.rng = rng


class SlotAlone:
    __slots__ = "rng"

    def __init__(self, rng):
        self.rng = rng


class Refusing:
    """Whose attributes are looked at without running its code."""

    def __init__(self, rng):
        self.rng = rng

    @property
    def data(self):
        raise AssertionError

    def __getattr__(self, name):
        raise AssertionError

    def __len__(self):
        raise AssertionError

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None


def closure(rng):
    def inner(x):
        return x + rng.normal()

    return lambda x: inner(x)


def circle(rng):
    first, second = SimpleNamespace(), SimpleNamespace()
    first.other, second.other, second.rng = second, first, rng
    return first


def wrapped(rng):
    @functools.lru_cache
    def function(x, source=rng):
        return x

    return function


def module_with(rng):
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    model[1][1].rng = rng
    return model


PLACES = {
    "itself": lambda rng: rng,
    "attribute": lambda rng: SimpleNamespace(rng=rng),
    "bit generator": lambda rng: SimpleNamespace(bits=rng.bit_generator),
    "nested": lambda rng: SimpleNamespace(transform=SimpleNamespace(steps=[1, {"noise": (rng,)}])),
    "subset": lambda rng: Subset(ConcatDataset([TensorDataset(torch.zeros(1)), [SimpleNamespace(rng=rng)]]), [0]),
    "closure": closure,
    "default": lambda rng: lambda x, source=rng: x,
    "keyword default": lambda rng: lambda x, *, source=rng: x,
    "partial": lambda rng: functools.partial(min, key=rng),
    "method": lambda rng: SimpleNamespace(noise=rng.normal),
    "wrapped": wrapped,
    "global variable": lambda rng: lambda x: [RNG.normal() for _ in range(2)],
    "global variable of a method": lambda rng: ByName(),
    "class": lambda rng: OfTheClass(),
    "static method": lambda rng: type("C", (), {"f": staticmethod(closure(rng))})(),
    "property": lambda rng: type("C", (), {"f": property(closure(rng))})(),
    "slot": Slotted,
    "one slot": SlotAlone,
    "without running code": Refusing,
    "circle": circle,
    "layer": module_with,
    "loader": lambda rng: DataLoader([SimpleNamespace(rng=rng)], batch_size=1),
    "collate function": lambda rng: DataLoader([0], collate_fn=closure(rng)),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found(place):
    found = Generators.of(PLACES[place](RNG)).found
    assert RNG.bit_generator in found
    assert len(found) == len(Generators.of().found) + 1


def test_generators_of_loader_and_sampler_are_found():
    given = torch.Generator()
    loader = DataLoader(range(3), shuffle=True, generator=given)
    assert given in Generators.of(loader).found
    assert any(g is given for g in Generators.of(loader.sampler).found)


@pytest.mark.parametrize(
    "holder",
    [None, 3, "text", torch.zeros(3), random.SystemRandom(), np.random, list(range(10**6)), nn.Linear(2, 2), len],
    ids=lambda holder: type(holder).__name__,
)
def test_nothing_else_is_taken_for_a_generator(holder):
    assert Generators.of(holder) == Generators.of()


def test_much_data_does_not_take_long(monkeypatch):
    """Large containers are not looked through, and after many objects the search ends."""
    looked = []
    original = randomness._parts
    monkeypatch.setattr(randomness, "_parts", lambda held: looked.append(held) or original(held))
    Generators.of([[i] for i in range(10**5)], {i: [i] for i in range(10**5)})
    assert len(looked) == 2
    looked.clear()
    monkeypatch.setattr(randomness, "_OBJECTS", 100)
    Generators.of([[[i] for i in range(200)] for _ in range(200)])
    assert len(looked) <= 100


# --- Loaders -------------------------------------------------------------------------------------------------------------


class Noisy(Dataset):
    """Records with noise: from a global generator by name, or from one that the data set holds."""

    def __init__(self, source, records=RECORDS, fail_at=None, error=None):
        self.source, self.records, self.fail_at, self.error = source, records, fail_at, error
        self.seen = []

    def __len__(self):
        return self.records

    def noise(self):
        if isinstance(self.source, str):
            return GLOBAL[self.source]()
        return KINDS[kind_of(self.source)][1](self.source)

    def __getitem__(self, index):
        noise = [self.noise() for _ in range(FEATURES)]
        self.seen.extend(noise)
        if index == self.fail_at:
            raise self.error
        return torch.tensor(noise, dtype=torch.float64), torch.ones(1, dtype=torch.float64)


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        records = Noisy(self.source)
        return (records[i] for i in range(len(records)))


def constant(worker_id):
    """A worker_init_fn that seeds everything, as many scripts have it."""
    seed_everything()


def constant_for_the_data(worker_id):
    get_worker_info().dataset.source = np.random.default_rng(0)


def noisy_collate(batch):
    inputs, targets = torch.utils.data.default_collate(batch)
    return inputs + torch.randn(inputs.shape, dtype=torch.float64), targets


def held(kind, seed=0):
    return KINDS[kind][0](seed)


LOADERS = {
    **{name: functools.partial(lambda name: DataLoader(Noisy(name), batch_size=4), name) for name in GLOBAL},
    **{
        f"{name}, two workers": functools.partial(
            lambda name: DataLoader(Noisy(name), batch_size=4, num_workers=2), name
        )
        for name in GLOBAL
    },
    **{
        f"{kind}, held": functools.partial(lambda kind: DataLoader(Noisy(held(kind)), batch_size=4), kind)
        for kind in ("torch", "numpy", "random")
    },
    "held, two workers": lambda: DataLoader(Noisy(held("numpy")), batch_size=4, num_workers=2),
    "shuffled": lambda: DataLoader(Noisy("torch"), batch_size=4, shuffle=True),
    "loader's generator": lambda: DataLoader(
        Noisy("torch"), batch_size=4, num_workers=2, shuffle=True, generator=held("torch")
    ),
    "one generator for both": lambda: (lambda g: DataLoader(Noisy(g), batch_size=4, shuffle=True, generator=g))(
        held("torch")
    ),
    "worker_init_fn": lambda: DataLoader(Noisy("numpy"), batch_size=4, num_workers=2, worker_init_fn=constant),
    "worker_init_fn, held": lambda: DataLoader(
        Noisy("numpy"), batch_size=4, num_workers=2, worker_init_fn=constant_for_the_data
    ),
    "collate function": lambda: DataLoader(
        Noisy("random"), batch_size=4, num_workers=2, worker_init_fn=constant, collate_fn=noisy_collate
    ),
    "stream": lambda: DataLoader(Stream("numpy"), batch_size=4),
    "stream, one worker": lambda: DataLoader(
        Stream("numpy"), batch_size=4, num_workers=1, worker_init_fn=constant, persistent_workers=True
    ),
}


def one_pass(loader):
    """All inputs of a pass, as the engine goes through a loader."""
    with Generators.of(loader).refreshed():
        stream = loaders.batches(loader, device=CPU, dtype=torch.float64, max_physical_batch_size=None, progress=False)
        return torch.cat([inputs for inputs, _ in stream])


def freshly(loader):
    """All inputs of a pass, as an Opacus loop goes through a loader."""
    return torch.cat([inputs for inputs, _ in randomness.freshly(loaders.each_alone(loader))])


@pytest.mark.parametrize("read", [one_pass, freshly])
@pytest.mark.parametrize("name", LOADERS)
def test_no_seed_brings_the_noise_of_a_loader_back(name, read):
    """Neither from one run to another, nor from one record or worker to another; and the script's streams are left alone."""
    seen = []
    for _ in range(2):
        loader = LOADERS[name]()
        seed_everything()
        expected = streams(*Generators.of(loader.generator, loader.dataset).found[3:])
        seen.append(read(loader))
        assert streams(*Generators.of(loader.generator, loader.dataset).found[3:]) == expected
    assert len(torch.cat(seen).unique()) == 2 * RECORDS * FEATURES


def test_workers_that_the_script_has_started_go_on_by_themselves():
    """The pass has its own, and the loader is what it was."""

    def epochs(between):
        seed_everything()
        loader = DataLoader(
            Noisy("numpy"), batch_size=4, num_workers=1, persistent_workers=True, worker_init_fn=constant
        )
        before = dict(vars(loader))
        first = torch.cat([x for x, _ in loader])
        iterator = loader._iterator
        between(loader)
        assert loader._iterator is iterator
        assert vars(loader) == before | {"_iterator": iterator}
        return torch.cat([first, *[x for x, _ in loader]])

    fresh = []
    expected = epochs(lambda loader: None)
    assert torch.equal(epochs(lambda loader: fresh.append(one_pass(loader))), expected)
    assert not set(fresh[0].flatten().tolist()) & set(expected.flatten().tolist())


def test_a_worker_keeps_what_the_users_function_does(monkeypatch):
    """The user's own function comes first, and fresh randomness after it, in copies of the data set too."""
    dataset = Noisy("numpy")
    worker = SimpleNamespace(dataset=dataset)
    monkeypatch.setattr(randomness, "get_worker_info", lambda: worker)
    seen = []

    def own(worker_id):
        seed_everything()
        dataset.source, dataset.number = np.random.default_rng(0), worker_id

    with Generators.of().refreshed():  # this process is no worker, and keeps its streams
        for _ in range(2):
            FreshWorker(own, None)(7)
            seen.append([dataset[0][0], *streams()])
    assert dataset.number == 7
    assert not torch.equal(seen[0][0], seen[1][0])
    assert len({*seen[0][1:], *seen[1][1:]}) == 6


def test_what_a_worker_starts_with_can_be_pickled():
    """As start methods other than fork need it; the collate function in it is the loader's own."""
    loader = loaders.each_alone(DataLoader([0], num_workers=1, worker_init_fn=constant, collate_fn=noisy_collate))
    init, collate = pickle.loads(pickle.dumps((loader.worker_init_fn, loader.collate_fn)))
    assert init.own is constant
    assert init.collate_fn is collate


# --- The engine ----------------------------------------------------------------------------------------------------------

OPTIONS = {"criterion": nn.MSELoss(), "max_grad_norm": 1.0, "max_curvature": 0.0}


def line():
    model = nn.Linear(FEATURES, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


class Dropping(nn.Module):
    """Drops inputs in evaluation mode, too, by torch's generator or by one of its own."""

    def __init__(self, rng=None):
        super().__init__()
        self.line, self.rng = line(), rng

    def forward(self, x):
        kept = (
            functional.dropout(torch.ones_like(x)) if self.rng is None else torch.rand(x.shape, generator=self.rng) * 2
        )
        return self.line(x * kept)


def plain_loader():
    x = torch.linspace(-2, 3, RECORDS * FEATURES, dtype=torch.float64).reshape(RECORDS, FEATURES)
    return DataLoader(TensorDataset(x, x[:, :1].cos()), batch_size=4)


def noisy_views(x):
    return [x, x + torch.randn(x.shape, dtype=x.dtype)]


VIEWS_RNG = torch.Generator().manual_seed(0)


def views_of_their_own(x):
    return [x, x + torch.randn(x.shape, dtype=x.dtype, generator=VIEWS_RNG)]


PASSES = {
    "data set": (line, lambda: DataLoader(Noisy("torch"), batch_size=4), {}),
    "data set, two workers": (line, lambda: DataLoader(Noisy("numpy"), batch_size=4, num_workers=2), {}),
    "views": (line, plain_loader, {"views": noisy_views}),
    "views, own generator": (line, plain_loader, {"views": views_of_their_own}),
    "dropout": (Dropping, plain_loader, {}),
    "dropout, own generator": (lambda: Dropping(torch.Generator().manual_seed(0)), plain_loader, {}),
    "resumable": (line, lambda: DataLoader(Noisy("random"), batch_size=4), {"private_checkpoint": True}),
    "bought bounds": (
        line,
        lambda: DataLoader(Noisy("torch", 400), batch_size=400),
        {"max_grad_norm": None, "epsilon": 100.0},
    ),
}


def gathered(name, directory):
    model, loader, changes = PASSES[name]
    options = OPTIONS | changes
    if "private_checkpoint" in options:
        options |= {"private_checkpoint": directory / "pass", "projection": Sparse(seed=0)}
    records, start = loader(), model()
    VIEWS_RNG.manual_seed(0)
    seed_everything()
    # Noise of bounds that are bought is the same in both runs.
    found = ExpMQuadEngine(noise_generator=np.random.default_rng(0)).gather(start, records, None, **options)
    return found.sums.gradient, streams(VIEWS_RNG)


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'", "ignore:gather\\(private_checkpoint")
@pytest.mark.parametrize("name", PASSES)
def test_no_seed_brings_the_sums_of_random_records_back(name, tmp_path):
    seed_everything()
    VIEWS_RNG.manual_seed(0)
    expected = streams(VIEWS_RNG)
    (first, after), (second, again) = gathered(name, tmp_path), gathered(name, tmp_path)
    assert not torch.equal(first, second)
    assert after == again == expected


def test_what_is_not_random_comes_back_to_the_bit():
    """Only data that draws is different from run to run."""
    first, second = (ExpMQuadEngine().gather(line(), plain_loader(), None, **OPTIONS).sums.gradient for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_breaks_off_leaves_the_streams_alone(error):
    mine = held("numpy")
    for source in ("torch", mine):
        loader = DataLoader(Noisy(source, fail_at=6, error=error()), batch_size=4, shuffle=True)
        model = line()
        seed_everything()
        expected = streams(mine)
        with pytest.raises(error):
            ExpMQuadEngine().gather(model, loader, None, **OPTIONS)
        assert loader.dataset.seen
        assert streams(mine) == expected


def test_every_round_draws_anew():
    """T rounds and their runs: no number comes twice."""
    seen = []
    for _ in range(2):
        dataset, model = Noisy("torch"), line()
        seed_everything()
        expected = streams()
        ExpMQuadEngine().make_private_expm(
            model, DataLoader(dataset, batch_size=4), 1.0, 0.5, None, rounds=2, regularization=1.0, **OPTIONS
        )
        assert streams() == expected
        seen += dataset.seen
    assert len(set(seen)) == len(seen) == 2 * 2 * RECORDS * FEATURES


# --- Draws of their own --------------------------------------------------------------------------------------------------


class Stretching(nn.Module):
    """Stretches a batch as a whole, by a number that is drawn outside torch, or by torch."""

    def __init__(self, draw):
        super().__init__()
        self.line, self.draw = line(), draw

    def forward(self, x):
        return self.line(x * self.draw())


def stretched_views(x):
    return [x * random.random()]


def torch_stretched_views(x):
    return [x * torch.rand(())]


SHARED = {
    "views": (line, {"views": stretched_views}),
    "views by torch": (line, {"views": torch_stretched_views}),
    **{
        f"model, {mode}{' by torch' if by_torch else ''}": (
            lambda by_torch=by_torch: Stretching((lambda: torch.rand(())) if by_torch else random.random),
            {"grad_sample_mode": None if mode == "hooks" else mode},
        )
        for mode in ("hooks", "functorch")
        for by_torch in (False, True)
    },
}


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch', because the model draws random numbers")
@pytest.mark.parametrize("name", SHARED)
def test_records_of_a_batch_do_not_share_what_is_drawn(name):
    """Batches add up to nothing unless their records are stretched differently, which a record before them would change."""
    model, options = SHARED[name]
    x = torch.ones(RECORDS, FEATURES, dtype=torch.float64)
    y = torch.tensor([1.0, 1.0, -1.0, -1.0] * (RECORDS // 4), dtype=torch.float64)[:, None]
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    bounds = {"max_grad_norm": 100.0, "max_curvature": 0.0}
    found = ExpMQuadEngine().gather(model(), loader, None, criterion=nn.MSELoss(), **options, **bounds)
    assert float(found.sums.gradient.norm()) > 1e-6
    plain = ExpMQuadEngine().gather(line(), loader, None, criterion=nn.MSELoss(), **bounds)
    assert float(plain.sums.gradient.norm()) < 1e-12


def test_hooks_are_refused_for_a_model_that_draws():
    with pytest.raises(ValueError, match="'hooks' cannot serve this model: the model draws random numbers"):
        ExpMQuadEngine().gather(Dropping(), plain_loader(), None, grad_sample_mode="hooks", **OPTIONS)
    with pytest.warns(UserWarning, match="because the model draws random numbers, and every record needs numbers of"):
        ExpMQuadEngine().gather(Dropping(), plain_loader(), None, **OPTIONS)


def test_a_model_that_draws_in_training_mode_alone_is_served_by_hooks():
    model = nn.Sequential(nn.Dropout(0.5), line())
    found = ExpMQuadEngine().gather(model, plain_loader(), None, grad_sample_mode="hooks", **OPTIONS)
    assert torch.equal(
        found.sums.gradient, ExpMQuadEngine().gather(line(), plain_loader(), None, **OPTIONS).sums.gradient
    )


@pytest.mark.parametrize("kind", KINDS)
def test_drawing_is_noticed(kind):
    make, draw = KINDS[kind]
    mine = make(0)
    found = Generators.of(mine)
    before = found.states()
    assert not found.drawn_since(before)
    draw(mine)
    assert found.drawn_since(before)


@pytest.mark.parametrize("name", GLOBAL)
def test_drawing_from_the_global_generators_is_noticed(name):
    found = Generators.of()
    before = found.states()
    GLOBAL[name]()
    assert found.drawn_since(before)
    found = Generators.of()
    before = found.states()
    GLOBAL[name]()  # the second of a pair
    assert found.drawn_since(before)


# --- An Opacus loop ------------------------------------------------------------------------------------------------------


def loop(dataset, model=None, epochs=2, see=lambda numbers: None, **options):
    """An Opacus loop over noisy records, of a script that seeds everything; what it drew before and after each batch."""
    model = line() if model is None else model
    seed_everything()
    module, optimizer, criterion, loader = ExpMQuadEngine().make_private_with_epsilon(
        grad_sample_mode="ghost",
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(dataset, batch_size=4, shuffle=True, **options),
        target_epsilon=1.0,
        target_delta=0.0,
        epochs=epochs,
        radius=0.5,
        proj_dim=None,
        max_grad_norm=1.0,
        max_curvature=0.0,
    )
    drawn = []
    for _ in range(epochs):
        for x, y in loader:
            see(x.flatten().tolist())
            drawn += [draw() for draw in GLOBAL.values()]
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
            drawn += [draw() for draw in GLOBAL.values()]
    return drawn


@pytest.mark.parametrize("source", [*GLOBAL, "held"])
def test_a_loop_reads_fresh_records_and_the_script_has_its_own_streams(source):
    """The script draws between batches what its seeds give, as if there were no private records."""
    seed_everything()
    batches = 2 * -(-RECORDS // 4)
    expected = [draw() for _ in range(2 * batches) for draw in GLOBAL.values()]
    seen = []
    for _ in range(2):
        dataset = Noisy(held("numpy") if source == "held" else source)
        assert loop(dataset) == expected
        seen += dataset.seen
    assert len(set(seen)) == len(seen) == 2 * 2 * RECORDS * FEATURES
    assert not set(seen) & set(expected)


@pytest.mark.filterwarnings("ignore:using grad_sample_mode='functorch'")
@pytest.mark.parametrize("own", [False, True])
def test_a_private_batch_runs_through_the_module_with_fresh_randomness(own):
    """In the loop's own forward pass and in the statistics: nothing is drawn from the script's streams."""
    seed_everything()
    expected = [draw() for _ in range(2 * RECORDS // 4) for draw in GLOBAL.values()]
    model = Dropping(torch.Generator().manual_seed(0) if own else None)
    assert loop(plain_loader().dataset, model, epochs=1) == expected
    if own:
        assert model.rng.get_state().equal(torch.Generator().manual_seed(0).get_state())


def test_evaluation_in_a_loop_draws_from_the_scripts_streams():
    """Data that is not private runs as in any script."""
    outputs = []
    for _ in range(2):
        model = Dropping()
        nn.init.ones_(model.line.weight)
        module, *_ = ExpMQuadEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
            data_loader=plain_loader(),
            target_epsilon=1.0,
            target_delta=0.0,
            epochs=1,
            radius=0.5,
            proj_dim=None,
            max_grad_norm=1.0,
            max_curvature=0.0,
        )
        seed_everything()
        with torch.no_grad():
            outputs.append(module(torch.ones(50, FEATURES, dtype=torch.float64)))
    assert torch.equal(*outputs)


def test_workers_of_a_loop_are_fresh_and_persist(monkeypatch):
    """Workers that persist are started once, with fresh randomness, whatever the user's function seeds."""
    started, original = [], DataLoader._get_iterator
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda self: started.append(self) or original(self))
    seen, workers = [], {"num_workers": 2, "persistent_workers": True, "worker_init_fn": constant}
    for _ in range(2):
        loop(Noisy("numpy"), see=seen.extend, **workers)
    assert len(set(seen)) == len(seen) == 2 * 2 * RECORDS * FEATURES
    assert sum(loader.num_workers == 2 for loader in started) == 2


def test_a_loop_that_breaks_off_leaves_the_streams_alone():
    seed_everything()
    expected = streams()
    with pytest.raises(KeyboardInterrupt):
        loop(Noisy("torch", fail_at=0, error=KeyboardInterrupt(), records=4))
    assert streams() == expected
