"""Collate functions: what a batch holds of a record depends on that record alone.

A collate function sees all records of a batch. If it pads to the longest of them, standardises by their mean, mixes two
images or leaves one out, then one more record changes what the others become, and the sums by far more than its own worth.

**By construction.** So a collate function is never shown two private records at once: ``Alone`` calls it with one record at
a time and puts the rows together itself. torch's ``default_collate`` stacks what the records hold, and does so at once where
they have equal types and shapes.

**Tried on made-up records.** A function that means to work on whole batches would do something else alone, silently: a
record that is standardised by itself is zero. So it is first tried on made-up records: alone, beside others, beside very
large, non-finite, constant and longer ones, and again after them. If a record's row changes, the loader is refused, with the
reason and the way out. Made-up records have the types and shapes of the first record that comes, and public values, so
whether a function is refused tells nothing about the values of a record. A function that fails on all made-up records cannot
be tried; a warning says so, and it is shown one record at a time like all others.

| collate function | verdict |
|---|---|
| ``default_collate``; a stack; Hugging Face's collators with ``padding="max_length"`` | accepted |
| augments each record, with generators that ``randomness`` finds | accepted |
| pads to the longest record of the batch | refused: a public length is needed |
| standardises by the batch, mixes records, infers the number of classes from the batch | refused |
| drops or repeats records, gives several rows for one | refused |
| keeps a running mean, or draws from a generator that is not found | refused: something is carried from record to record |

**What remains.** Types and shapes of records are taken to be public. Records of one batch must agree in them: where they do
not, the pass ends with an error, which holds no number but tells that they differ. What a function carries from record to
record in ways that made-up records do not bring out cannot be seen.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from opacus_expm._warnings import warn
from opacus_expm.gathering.model import ran_out_of_memory
from opacus_expm.gathering.randomness import Generators

Collate = Callable[[list[Any]], Any]

PLAIN = (bool, int, float, str, bytes, type(None))  # what is no tensor and may stand in a batch
_WORDS = ("a", "to", "sun", "tree", "river", "window", "morning", "elephant")
_SENTENCE = 3  # words
_WORTH = "one record could then move the sums by more than one record's worth"
_SHAPES = (
    "gives a record another shape beside other records, as padding to the longest of the batch does: {worth}; pad or cut "
    "every record to one public length L, in place of pad_sequence by torch.nn.functional.pad(x, (0, L - len(x))), or for "
    "Hugging Face's tokenizers and collators by padding='max_length' and max_length=L"
)
_VALUES = (
    "gives a record other values beside other records, as a mean over the batch does: {worth}; work on one record at a "
    "time, in the data set, with public constants"
)
_ROWS = "does not give one row for each record: every record must count exactly once; drop or repeat none"
_FAILS = "fails on a record alone: it must make one row of every record, whatever is beside it, and leave none out"
_STATE = (
    "gives a record other values when it comes again, as a running mean or a hidden stream of numbers does: {worth}; use "
    "torch's, numpy's or Python's generators, and public constants"
)


class Alone:
    """A collate function that is shown one record at a time, after a trial on made-up records.

    Args:
        collate: the user's function.
        name: of the loader, for messages.
        several: whether batches may hold several records; where they do not, it is tried on single ones.
    """

    def __init__(self, collate: Collate, name: str, *, several: bool):
        self._collate, self._name, self._several = collate, name, several
        self._untried = collate is not default_collate

    def __call__(self, records: list[Any]) -> Any:
        """A batch with one row for each record.

        Raises:
            ValueError: the function is of the refused kinds, fails on a record, or the records differ in type or shape.

        **Privacy:** each row depends on its own record alone.
        """
        if self._collate is default_collate and alike(records):
            return default_collate(records)
        if self._untried:
            try_on_made_up_records(self._collate, records[0], self._name, several=self._several)
            self._untried = False
        return joined([self._row(record) for record in records], self._name)

    def _row(self, record: Any) -> Any:
        """A batch of one record."""
        try:
            return self._collate([record])
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            raise ValueError(f"{self._name}'s collate function {_FAILS}") from error


# --- putting together -----------------------------------------------------------------------------------------------


def alike(records: Sequence[Any]) -> bool:
    """Whether ``default_collate`` only stacks these records, because their types and shapes are equal."""
    first = records[0]
    if any(type(record) is not type(first) for record in records):
        return False
    if type(first) is Tensor:
        dtype, shape = first.dtype, first.shape
        return first.layout is torch.strided and all(
            record.dtype == dtype and record.shape == shape and not record.is_nested for record in records
        )
    if type(first) is np.ndarray:
        return all(record.dtype == first.dtype and record.shape == first.shape for record in records)
    if isinstance(first, tuple | list):
        return all(len(record) == len(first) for record in records) and all(map(alike, zip(*records, strict=True)))
    if type(first) is dict:
        return all(record.keys() == first.keys() for record in records) and all(
            alike([record[key] for record in records]) for key in first
        )
    return isinstance(first, int | float | str | bytes | np.number | np.bool_)


def joined(rows: Sequence[Any], name: str) -> Any:
    """Batches of one record each as one batch of all: tensors below each other, lists of one string or number as one list.

    Raises:
        ValueError: rows that differ in type or shape, or hold something else. The message holds no values.
    """
    first = rows[0]
    if any(type(row) is not type(first) for row in rows):
        _refuse_rows(name, "types")
    if isinstance(first, Tensor):
        if any(row.dim() == 0 or row.shape[0] != 1 for row in rows):
            raise ValueError(f"{name}'s collate function {_ROWS}")
        if any(row.dtype != first.dtype for row in rows):
            _refuse_rows(name, "types")
        if any(row.shape != first.shape for row in rows):
            _refuse_rows(name, "shapes")
        return torch.cat(list(rows))
    if isinstance(first, Mapping):
        if any(row.keys() != first.keys() for row in rows):
            _refuse_rows(name, "fields")
        return _like_mapping(first, {key: joined([row[key] for row in rows], name) for key in first})
    if isinstance(first, tuple | list):
        if any(len(row) != len(first) for row in rows):
            _refuse_rows(name, "lengths")
        if len(first) == 1 and all(isinstance(row[0], PLAIN) for row in rows):
            return _like_sequence(first, [row[0] for row in rows])
        return _like_sequence(first, [joined(column, name) for column in zip(*rows, strict=True)])
    if not isinstance(first, PLAIN):
        raise ValueError(
            f"{name}'s collate function gives a {type(first).__name__}, of which it is not known what belongs to which "
            "record; give tensors with one row for each record"
        )
    if any(row != first for row in rows):
        raise ValueError(
            f"{name}'s collate function gives a {type(first).__name__} that is not the same for all records: give a tensor "
            "with one row for each record, or a list with one entry for each"
        )
    return first


def _refuse_rows(name: str, what: str) -> NoReturn:
    """Raise the error that says that these records cannot be one batch."""
    raise ValueError(
        f"{name} gives records of different {what}, which cannot be one batch: all records need one public shape and type; "
        "pad or cut them to it in the data set or the collate function"
    )


def _like_mapping(first: Mapping[str, Any], fields: dict[str, Any]) -> Mapping[str, Any]:
    """The fields in a mapping of the same class, since a training loop may call its methods; in a dict where that fails."""
    kind: Any = type(first)
    try:
        found: Mapping[str, Any] = kind(fields)
    except TypeError:
        return fields
    return found


def _like_sequence(first: Any, parts: list[Any]) -> Any:
    """The parts in a tuple, a named tuple or a list, whichever the first record has."""
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


# --- made-up records ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """One trial: a made-up record, how many records stand before and after it, and which values these hold."""

    values: str
    beside: str
    before: int = 0
    after: int = 1
    longer: int = 0  # how much longer those beside it are,
    axis: int = 0  # in which dimension,
    which: frozenset[int] = frozenset()  # and which of their sequences


_TRIALS = (
    _Trial("normal", "normal", before=3, after=4),
    _Trial("unit", "unit"),
    _Trial("bytes", "bytes"),
    _Trial("normal", "huge"),
    _Trial("normal", "huge", before=1, after=0),
    _Trial("normal", "not finite"),
    _Trial("normal", "zeros"),
    _Trial("normal", "ones"),
    _Trial("zeros", "ones"),
    _Trial("ones", "zeros"),
)
_LONGER = (1, 9, 300)  # lengths may be rounded up to a multiple of a power of two
_MOST_NUMBERS = 2**20  # in a longer tensor
_MOST_GROUPS = 8  # of sequences that are longer together
_DRAWN = 1009  # numbers are drawn; more repeat them


class _CannotMakeUp(Exception):
    """Raised where a record holds something for which no made-up value is known."""


def try_on_made_up_records(collate: Collate, like: Any, name: str, *, several: bool = True) -> None:
    """Raise if a made-up record's row depends on what is beside it, or on what came before.

    Args:
        collate: the function.
        like: a record, of which types and shapes are taken and no values.
        name: of the loader, for messages.
        several: whether to show it several records at once; else one after the other.

    Raises:
        ValueError: with the reason and the way out.
    """
    tried = False
    generators = Generators.of(collate)  # its own among them: in a pass they are fresh

    def reseed(seed: int) -> None:
        generators.reseed(random.Random(seed).randbytes)

    with generators.refreshed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about made-up records
        for trial in (*_TRIALS, *_with_longer_ones(like)):
            try:
                reason = _finding(collate, like, trial, reseed, several=several)
            except Exception as error:  # made-up records may mean nothing to it
                if ran_out_of_memory(error):
                    raise
                continue
            if reason is not None:
                raise ValueError(f"{name}'s collate function {reason.format(worth=_WORTH)}")
            tried = True
    if not tried:
        warn(
            f"{name}'s collate function cannot be tried on made-up records; every record is collated alone, so nothing that "
            "it does to a whole batch takes effect",
        )


def _finding(collate: Collate, like: Any, trial: _Trial, reseed: Callable[[int], None], *, several: bool) -> str | None:
    """What one trial finds wrong with a collate function, in words; None where it finds nothing.

    Raises:
        Exception: whatever the function raises for records other than the one that is compared.
    """

    def record() -> Any:  # made anew for every call: a collate function may take it apart
        return _made_up(like, trial.values, seed=0)

    def others(count: int, first_seed: int) -> list[Any]:
        return [_made_up(like, trial.beside, seed=first_seed + i, longer=trial) for i in range(count)]

    def collated(records: list[Any], seed: int = 0) -> list[Tensor]:
        reseed(seed)
        return _tensors_of(collate(records))

    alone: list[Tensor] | None = None
    try:
        alone = collated([record()])
    except Exception as error:
        if ran_out_of_memory(error):
            raise
    batch = [*others(trial.before, 1), record(), *others(trial.after, 100)]
    beside = collated(batch) if several else [t for other in batch for t in collated([other])]
    if alone is None:
        return _FAILS
    at_random = _reason(alone, collated([record()], seed=1), 1) is not None
    found = _reason(alone, beside, len(batch), at_random=at_random) if several else None
    changed = _reason(alone, collated([record()]), 1)
    return found or (_STATE if changed == _VALUES else changed)


def _reason(alone: list[Tensor], beside: list[Tensor], count: int, *, at_random: bool = False) -> str | None:
    """Why no row of a batch is the record's own row; small differences do not count where a function draws at random."""
    if len(alone) != len(beside) or any(t.dim() == 0 or len(t) != 1 for t in alone):
        return _ROWS
    if any(t.dim() == 0 or len(t) != count for t in beside):
        return _ROWS
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(alone, beside, strict=True)):
        return _SHAPES
    for place in range(count):
        if all(_same(a[0], b[place], at_random=at_random) for a, b in zip(alone, beside, strict=True)):
            return None
    return _VALUES


def _same(alone: Tensor, beside: Tensor, *, at_random: bool) -> bool:
    """Whether two rows are equal up to rounding or, where they are drawn at random, of the same order of magnitude."""
    if alone.dtype != beside.dtype:
        return False
    if not alone.is_floating_point():
        return at_random or torch.equal(alone, beside)
    finite = alone.isfinite()
    if not torch.equal(finite, beside.isfinite()):
        return False
    largest = max(1.0, *alone[finite].abs().amax(0, keepdim=True).tolist()) if bool(finite.any()) else 1.0
    return bool((alone - beside)[finite].abs().le((1e3 if at_random else 1e-3) * largest).all())


def _tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order; what is no tensor is not compared."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]


def _with_longer_ones(like: Any) -> Iterator[_Trial]:
    """Trials beside records whose sequences are longer: all of them, those of equal length, and each alone."""
    sizes = _sequences(like)
    groups = [frozenset(range(len(sizes)))]
    groups += [frozenset(i for i, other in enumerate(sizes) if other[0] == size[0]) for size in sizes]
    groups += [frozenset([i]) for i in range(len(sizes))]
    for which in [group for group in dict.fromkeys(groups) if group][:_MOST_GROUPS]:
        for longer in _LONGER:
            for axis in (0, -1) if any(len(sizes[i]) > 1 for i in which) else (0,):
                yield _Trial("normal", "normal", longer=longer, axis=axis, which=which)


def _sequences(like: Any) -> list[tuple[int, ...]]:
    """The shapes of what may be longer in another record, in the order in which ``_made_up`` comes to it."""
    if isinstance(like, Tensor | np.ndarray):
        return [tuple(like.shape)] if like.ndim else []
    if isinstance(like, str):
        return [(_SENTENCE,)]
    if _variable(like):
        return [(len(like),)]
    parts = like.values() if isinstance(like, Mapping) else like if isinstance(like, tuple | list) else ()
    return [size for part in parts for size in _sequences(part)]


def _variable(like: Any) -> bool:
    """Whether this is a list whose length may vary, such as one of tokens, words or boxes."""
    return isinstance(like, list) and bool(like) and isinstance(like[0], bool | int | float | str | list | dict)


def _made_up(like: Any, values: str, *, seed: int, longer: _Trial | None = None) -> Any:
    """A record with the types and shapes of another and public values; some of its sequences may be longer."""
    generator = torch.Generator().manual_seed(seed)
    counted = itertools.count()

    def shape(of: Sequence[int], *, inside: bool) -> list[int]:
        found = list(of)
        if found and not inside and longer is not None and next(counted) in longer.which:
            found[longer.axis] += longer.longer
            if math.prod(found) > _MOST_NUMBERS:
                raise _CannotMakeUp
        return found

    def made(like: Any, *, inside: bool = False) -> Any:
        if isinstance(like, Tensor):
            return _numbers(shape(like.shape, inside=inside), like.dtype, values, generator).to(like.device)
        if isinstance(like, np.ndarray | np.generic):
            if like.dtype.kind not in "biufc":
                raise _CannotMakeUp
            dtype = torch.from_numpy(np.zeros(1, like.dtype)).dtype
            found = _numbers(shape(like.shape, inside=inside), dtype, values, generator).numpy()
            return found if isinstance(like, np.ndarray) else found[()]
        if isinstance(like, bool | int | float):
            dtype = torch.float64 if isinstance(like, float) else torch.int64
            return type(like)(_numbers([], dtype, values, generator).item())
        if isinstance(like, str):
            (count,) = shape([_SENTENCE], inside=inside)
            return " ".join(_WORDS[i] for i in torch.randint(len(_WORDS), (count,), generator=generator))
        if like is None:
            return None
        if isinstance(like, Mapping):
            return _like_mapping(like, {key: made(value, inside=inside) for key, value in like.items()})
        if _variable(like):
            (count,) = shape([len(like)], inside=inside)
            return [made(like[min(i, len(like) - 1)], inside=True) for i in range(count)]
        if isinstance(like, tuple | list):
            return _like_sequence(like, [made(part, inside=inside) for part in like])
        raise _CannotMakeUp

    return made(like)


def _numbers(shape: list[int], dtype: torch.dtype, values: str, generator: torch.Generator) -> Tensor:
    """Numbers of a kind; integers are 0 and 1, which are valid indices nearly everywhere, or bytes."""
    count = math.prod(shape)
    few = min(count, _DRAWN)
    if values in ("zeros", "ones"):
        drawn = torch.full((few,), float(values == "ones"))
    elif not (dtype.is_floating_point or dtype.is_complex):
        drawn = torch.randint(256 if dtype == torch.uint8 else 2, (few,), generator=generator)
    elif values == "not finite":
        drawn = torch.full((few,), torch.nan)
    elif values in ("unit", "bytes"):
        drawn = torch.rand(few, generator=generator) * (255 if values == "bytes" else 1)
    else:
        drawn = torch.randn(few, generator=generator) * (1e6 if values == "huge" else 1)
    return drawn.to(dtype).repeat(-(-count // max(few, 1)))[:count].reshape(shape)
