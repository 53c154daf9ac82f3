"""The randomness of the data: fresh from the operating system around every pass, whatever seed the script has set.

Augmentation, random views and dropout in a functional call make a record's statistics random. Numbers are drawn for one
record after the other, so one more record shifts the stream of all that come later. Under a seed that is known
(``torch.manual_seed(0)`` in a script that is published) every one of them then changes in a known way, and the sums move by
many records' worth.

**Why fresh randomness suffices.** Let ω_i be what is drawn for record i, so that its clipped quadratic is a function of the
record and of ω_i. In an unknown stream of independent numbers, the numbers after a record are independent of those before,
however many it took: the ω_i are independent, and the law of each is that of its own record, at whatever place and in
whatever process the record is visited. One more record z adds an ω_z and leaves the law of all the others as it was. Give
the common records of D and D∪{z} the same ω: for each value of ω the sums differ by the one clipped quadratic of z, and
the draw has the privacy that is claimed, with all its curves (ε-range, Rényi, (ε, δ), μ). As the law of ω is the same for
both data sets, somebody who sees the release *and* ω learns no more than that: the hockey-stick divergence of the pair is
the mean over ω, and Rényi's is at most the largest. Who sees the release alone learns no more either (post-processing).

**Every record has draws of its own.** One number for all records of a batch (a batch of images flipped together, a layer
dropped for a whole batch) would tie records to whoever shares their batch, and one more record moves the borders of batches.
So records are fetched and collated one at a time, and views and models that are seen to draw are run record by record. A
criterion that draws must do so for each record.

**Passes need not agree.** Where bounds are bought in one pass over the data and the sums gathered in another, a record has
another ω in each. Nothing rests on their agreement: the purchase is charged for its own pass, and the clipping is done in
the pass that adds up. A pass that is resumed, or starts again with less memory, draws anew for what is left of it.

**What is refreshed:** the generators of torch (those of CUDA devices in use, too), numpy and ``random``; each
``torch.Generator``, numpy ``Generator`` or ``RandomState`` and ``random.Random`` to which the loader, the data set, the
collate function, the module, the views or the criterion lead: attributes of theirs, in containers and nested objects, the
variables of functions around them, and the global variables that functions and methods of the user's own files name; and
all of these in each of the loader's workers, after the user's ``worker_init_fn``. What is found is set back afterwards to
the bit, so that a script goes on with its seeds as if no pass had been. Other threads that draw from these generators
during a pass draw fresh numbers.

**What remains with the user:** generators that cannot be found, such as those of libraries in other languages, and seeds
that a data set sets by itself while it is read, as ``random.seed(index)`` or ``numpy.random.default_rng(0)`` in
``__getitem__`` or ``__iter__``: a record's randomness must not be a function of a known seed and its place.

The streams are those of ordinary generators, started in a state that nobody knows.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

AnyGenerator = torch.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
T = TypeVar("T")
Entropy = Callable[[int], bytes]  # from a number of bytes to as many

_ITEMS = 256  # of a container that is looked through; larger ones hold data
_OBJECTS = 100_000  # that are looked at, the nearest ones
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PLAIN = (Tensor, np.ndarray, str, bytes, int, float, complex, ModuleType, type(None))
_WORDS, _BEGIN = 624, 24  # of the Mersenne twister, and the byte where they stand in the state of torch's


@dataclass(frozen=True)
class Generators:
    """The generators from which the records of a pass may draw."""

    found: tuple[AnyGenerator, ...]

    @classmethod
    def of(cls, *holders: object) -> Generators:
        """The global generators of torch, numpy and ``random``, and those to which the holders lead."""
        devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        everywhere = (torch.default_generator, *devices, np.random.mtrand._rand, random._inst)
        return cls(tuple({id(g): g for g in (*everywhere, *_held_by(holders))}.values()))

    @contextmanager
    def refreshed(self, entropy: Entropy = os.urandom) -> Iterator[None]:
        """Other randomness inside; afterwards, also after an error or an interrupt, every state is what it was."""
        before = self.states()
        try:
            self.reseed(entropy)
            yield
        finally:
            _set_states(self.found, before)

    def repeated(self, seed: int = 0) -> AbstractContextManager[None]:
        """The same randomness at every entry, for comparing two runs on synthetic records."""
        return self.refreshed(random.Random(seed).randbytes)

    def states(self) -> list[Any]:
        """The states of all generators, which decide all later numbers."""
        return [_state(g) for g in self.found]

    def drawn_since(self, states: list[Any]) -> bool:
        """Whether a number was drawn since the generators had these states."""
        return not all(map(_same, self.states(), states))

    def reseed(self, entropy: Entropy = os.urandom) -> None:
        """Start every generator from a state of its own that the entropy decides."""
        for generator in self.found:
            _reseed(generator, entropy)


def freshly(items: Iterable[T]) -> Iterator[T]:
    """The items, such as a loader's batches, each made in fresh randomness, which is left again between them."""
    generators = Generators.of(items)
    with generators.refreshed():
        stream = iter(items)
    while True:
        with generators.refreshed():
            try:
                item = next(stream)
            except StopIteration:
                return
        yield item


@dataclass(frozen=True)
class FreshWorker:
    """A loader's ``worker_init_fn``: the user's own, and after it fresh randomness in the worker.

    Attributes:
        own: the user's function, which may seed what it likes.
        collate_fn: of the loader; it runs in the worker, too.
    """

    own: Callable[[int], None] | None
    collate_fn: Callable[..., Any] | None

    def __call__(self, worker_id: int) -> None:
        """Called in the worker process when it starts."""
        if self.own is not None:
            self.own(worker_id)
        worker = get_worker_info()
        Generators.of(self.own, self.collate_fn, None if worker is None else worker.dataset).reseed()


# --- states -----------------------------------------------------------------------------------------------------------


def _state(generator: AnyGenerator) -> Any:
    """The generator's whole state, which decides all later numbers."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal, whatever types they are made of."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[name], other[name]) for name in one)
    return bool(np.all(one == other))


def _set_states(generators: Iterable[AnyGenerator], states: Iterable[Any]) -> None:
    """Set every generator back to its state, as ``_state`` gave it."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.BitGenerator):
            generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


def _reseed(generator: AnyGenerator, entropy: Entropy) -> None:
    """Start a generator from new entropy: 64 bits of it on devices, and 128 bits or more elsewhere."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(_number(entropy(8)))
        if generator.device.type == "cpu":
            # Of a seed torch takes 32 bits here, which can all be tried; so all words of the state are set.
            state = generator.get_state()
            words = np.frombuffer(entropy(4 * _WORDS), np.uint32).astype(np.uint64)
            state[_BEGIN : _BEGIN + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8))
            generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.seed(_number(entropy(32)))
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = type(generator)(_number(entropy(32))).state
    else:
        seed = entropy(32)
        try:
            generator.seed(np.frombuffer(seed, np.uint32))
        except TypeError:  # not a Mersenne twister inside
            bits = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])(_number(seed))
            generator.set_state(np.random.RandomState(bits).get_state(legacy=False))


def _number(content: bytes) -> int:
    return int.from_bytes(content, "little")


# --- where generators are found -----------------------------------------------------------------------------------------


def _held_by(holders: Iterable[object]) -> Iterator[AnyGenerator]:
    """The generators to which objects lead, the nearest first."""
    seen: dict[int, object] = {}  # with the objects, so that their ids stay their own
    ahead = deque(holders)
    while ahead and len(seen) < _OBJECTS:
        held = ahead.popleft()
        if isinstance(held, _PLAIN) or id(held) in seen:
            continue
        seen[id(held)] = held
        found = held.bit_generator if isinstance(held, np.random.Generator) else held
        if not isinstance(found, AnyGenerator):
            ahead.extend(_parts(found))
        elif not isinstance(found, random.SystemRandom):  # which has no state, and the system's entropy already
            yield found


def _parts(held: object) -> Iterator[object]:
    """The objects that an object refers to directly. No code of its own is run."""
    if isinstance(held, dict):
        yield from dict.values(held) if len(held) <= _ITEMS else ()
    elif isinstance(held, list | tuple | set | frozenset):
        yield from held if len(held) <= _ITEMS else ()
    elif isinstance(held, functools.partial):
        yield from (held.func, held.args, held.keywords)
    elif isinstance(held, MethodType | BuiltinMethodType):
        yield from (held.__self__, getattr(held, "__func__", None))
    elif isinstance(held, staticmethod | classmethod):
        yield held.__func__
    elif isinstance(held, property):
        yield held.fget
    elif isinstance(held, FunctionType):
        yield from (held.__dict__, held.__defaults__, held.__kwdefaults__)
        for cell in held.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield cell.cell_contents
        if not _is_of_a_library(held.__module__):
            yield from (held.__globals__[name] for name in _names(held.__code__) if name in held.__globals__)
    elif isinstance(held, type):
        if not _is_of_a_library(held.__module__):
            yield from (*vars(held).values(), *held.__bases__)
    else:
        yield type(held)
        with suppress(AttributeError):  # one with slots alone
            yield from object.__getattribute__(held, "__dict__").values()
        for kind in type(held).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                with suppress(AttributeError):  # an empty one
                    yield object.__getattribute__(held, name)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function's code uses, including the code of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_a_library(module: str) -> bool:
    """Whether a module belongs to an installed library; notebooks and scripts are the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or file.startswith(_LIBRARIES))
