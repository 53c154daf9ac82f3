"""What a model does with a record may depend on that record alone; here this is tried on synthetic records.

The guarantee compares two data sets that differ in one record, and holds only if that record changes no other record's
statistics. A network can break this through the batch (a mean, a scan, ``if x.max() > 1``) and through state (a buffer or an
attribute that a forward pass changes). Neither is assumed away; both are tried on synthetic records before the private ones
are touched. Synthetic records take the shapes and types of the loader's first batch, never its values, so that passing or
failing tells nothing about a record.

*Through the batch* (``check_mixing``). Each of two records is run beside the other one, alone, in another place, in a crowd,
and beside other neighbours: ordinary ones, some a million times as large, some not finite. Its outputs and its gradient must
stay the same up to rounding. A linear mixture of records is noticed down to weights of about 10⁻⁹.

*Through a branch* (``may_branch``). ``if (x == 3.14).any()`` may never be taken by a synthetic record. ``vmap`` refuses to
branch on a record's values, so a model that runs under it has no such branch. Where ``vmap`` refuses, everything that the
program reads off its tensors is written down while ``check_mixing`` runs. A condition is harmless if it was seen to be
decided in one way by a record alone and in the other way by its batch, without changing what comes out for the record:
Hugging Face's models ask ``if mask.all()`` and skip a mask that masks nothing. Every other reading counts as a dependence.

*Through state* (``State``). What a forward pass changes in the module is found by comparing it before and after, and is put
back before each piece of a pass (before each record, where records run alone). If a record's outputs still change after
another record was run, the state is kept where it cannot be seen, and the model is refused.

A model whose records depend on each other through the batch is served all the same: each record runs alone, and a warning
says so.

**What remains:** rounding that depends on the place in a batch (``docs/pages/sharp-edges.md`` says how much), and a program
that hides: one that reads its values behind torch's back, or that keeps state out of sight and shows it rarely.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_expm.gathering.model import call, outputs_of, plain_attention, ran_out_of_memory
from opacus_expm.gathering.randomness import Generators

Run = Callable[[Any], Sequence[Tensor]]  # from a batch of inputs to tensors with one row a record

RANGES = ("normal", "unit", "bytes")  # N(0, 1), [0, 1] and [0, 255]
_RECORDS = 2
_CROWD = 8  # records of a larger batch
_HUGE = 1e6
_IDS = (1000, 100, 10)  # token ids below the first of these that the model accepts
_BLIND = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})  # pass the dispatcher by
_READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique",
)


class DependentRecords(Exception):
    """A record's outputs depend on other records of its batch; the message says how it was found."""


# --- synthetic records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Probes:
    """Synthetic records with the shapes and types of an example, which are all that is taken from it.

    Attributes:
        example: inputs of one record, with a batch dimension of one.
        values: one of ``RANGES``, for floating inputs.
        ids: exclusive upper limits of the integer inputs, in the order of the leaves.
    """

    example: Any
    values: str
    ids: Sequence[int] = ()

    def record(self, kind: str, seed: int) -> Any:
        """One record, with a batch dimension of one; of ``kinds``, or ``"last"`` with the largest integers."""
        generator = torch.Generator().manual_seed(seed)
        leaves, structure = pytree.tree_flatten(self.example)
        return pytree.tree_unflatten([self._leaf(i, t, kind, generator) for i, t in enumerate(leaves)], structure)

    def _leaf(self, place: int, like: Any, kind: str, generator: torch.Generator) -> Any:
        if not isinstance(like, Tensor):
            return like
        if not (like.is_floating_point() or like.is_complex()):
            limit = self.ids[place] if self.ids else 2
            drawn = torch.randint(limit, like.shape, generator=generator)
            constant = {"even": 1, "last": limit - 1}.get(kind)
            return (drawn if constant is None else torch.full_like(drawn, constant)).to(like)
        drawn = torch.randn(like.shape, generator=generator)
        if self.values != "normal":
            drawn = torch.rand(like.shape, generator=generator) * (255.0 if self.values == "bytes" else 1.0)
        if kind == "huge":
            drawn = drawn * _HUGE * torch.where(torch.rand(like.shape, generator=generator) < 0.5, -1.0, 1.0)
        if kind == "not finite":
            strange = torch.tensor([torch.nan, torch.inf, -torch.inf])
            drawn = strange[torch.randint(3, like.shape, generator=generator)]
        return drawn.to(like)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of neighbours: ``"even"`` has ones for integers, as a mask that masks nothing."""
        floating = [t.is_floating_point() for t in pytree.tree_leaves(self.example) if isinstance(t, Tensor)]
        even = () if all(floating) else ("even",)
        return ("plain", *even, *(("huge", "not finite") if any(floating) else ()))

    @property
    def constant(self) -> str:
        """Which kind of values the second record has."""
        return "even" if "even" in self.kinds else "plain"


def together(records: Sequence[Any]) -> Any:
    """One batch of several records, each of which has a batch dimension of one."""
    leaves = [pytree.tree_leaves(r) for r in records]
    joined = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(joined, pytree.tree_structure(records[0]))


@torch.no_grad()
def synthetic_outputs(run: Callable[[Any], Tensor], example: Any) -> Tensor | None:
    """Outputs for two synthetic records, which are public; None where the model cannot be run on them."""
    probes = _Probes(example, RANGES[0])
    try:
        return run(together([probes.record("plain", seed) for seed in range(_RECORDS)]))
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        if ran_out_of_memory(error):
            raise
        return None


def _every_range(example: Any) -> Iterator[_Probes]:
    """Probes for each range of values of floating inputs; integers are bits."""
    tensors = [t for t in pytree.tree_leaves(example) if isinstance(t, Tensor)]
    for values in RANGES if any(t.is_floating_point() for t in tensors) else RANGES[:1]:
        yield _Probes(example, values)


def _accepted_ids(run: Run, example: Any) -> list[int]:
    """For each leaf the largest limit of ``_IDS`` (256 for bytes) that the model accepts, else 2.

    Only on the CPU: an index out of range ends a CUDA context.
    """
    leaves = pytree.tree_leaves(example)
    limits = [2] * len(leaves)
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype == torch.bool:
            continue
        if leaf.dtype == torch.uint8:
            limits[place] = 256
        elif leaf.device.type == "cpu":
            for limit in _IDS:
                tried = [*limits]
                tried[place] = limit
                with suppress(IndexError, RuntimeError, ValueError):
                    run(_Probes(example, RANGES[0], tried).record("last", 0))
                    limits = tried
                    break
    return limits


# --- through the batch ----------------------------------------------------------------------------------------------


@contextmanager
def _readings() -> Iterator[list[bool | None]]:
    """Collects what a program reads from its tensors inside: the values of conditions, and None for anything else."""
    found: list[bool | None] = []
    with _AbovePython(found), _BelowPython(found):
        yield found


class _AbovePython(TorchFunctionMode):
    """Notices values that are read before torch's dispatcher sees the call."""

    def __init__(self, found: list[bool | None]):
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _BLIND:
            self._found.append(None)
        return function(*args, **(kwargs or {}))


class _BelowPython(TorchDispatchMode):
    """Notices values that are read in calls that torch's dispatcher sees."""

    def __init__(self, found: list[bool | None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.name().startswith(_READS):
            self._found.append(result if isinstance(result, bool) else None)
        return result


def check_mixing(run: Run, example: Any, *, branches: bool, gradients: Run | None = None) -> None:
    """Raise if what comes out for a record depends on the other records of its batch.

    Args:
        run: from a batch of inputs to tensors with one row a record, such as the outputs.
        example: inputs of one record, with a batch dimension of one; shapes and types are all that is used.
        branches: whether the program may branch on values, so that what it reads has to be watched.
        gradients: as ``run``, for what takes a backward pass; it is compared less often.

    Raises:
        DependentRecords: with how it was found.
    """
    read, decided = 0, set[int]()
    for probes in _every_range(example):
        trial = _Trial(run, probes, watched=branches)
        read = max(read, trial.judge())
        decided |= trial.decided
        if gradients is not None:
            _Trial(gradients, probes, watched=False).judge_beside("plain", *probes.kinds[-1:])
            gradients = None  # where values lie matters for branches, which outputs show
    if len(decided) < read:
        raise DependentRecords("the model branches on values of the batch")
    _Trial(run, _Probes(example, RANGES[0], _accepted_ids(run, example)), watched=False).judge_beside("plain")


class _Trial:
    """The comparisons of ``check_mixing`` for one range of values."""

    def __init__(self, run: Run, probes: _Probes, *, watched: bool):
        self._run, self._probes, self._watched = run, probes, watched
        self._readings: list[bool | None] = []  # of the last run
        self.decided: set[int] = set()  # readings that a record alone and its batch decided differently
        self._base = [probes.record("plain", 0), probes.record(probes.constant, 1)]
        self._alone: list[list[bool | None]] = []
        self._beside: Sequence[Tensor] = ()
        self._generators = Generators.of(run)

    def judge(self) -> int:
        """The number of conditions that a run reads; raises ``DependentRecords`` where a record comes out differently."""
        alone = []
        for record in self._base:
            alone.append(self._rows(record))
            self._alone.append(self._readings)
        self.judge_beside(*self._probes.kinds)
        if self._steady(together(self._base)):  # random draws fall differently in another shape or place
            for i, rows in enumerate(alone):
                _compare(rows, 0, self._beside, i, rounding=1 / 2, how="alone and in a batch")
            moved = self._rows(together(self._base[::-1]))
            for i in range(_RECORDS):
                _compare(moved, _RECORDS - 1 - i, self._beside, i, rounding=1 / 2, how="in another place of the batch")
            for kind in self._probes.kinds:
                self._judge_crowd(kind)
        return len(self._alone[0])

    def _judge_crowd(self, kind: str) -> None:
        """Raise where a record comes out differently in a larger batch; where that does not fit, batches are smaller."""
        neighbours = [self._probes.record(kind, 100 + j) for j in range(_CROWD - _RECORDS)]
        try:
            crowd = self._rows(together([*self._base, *neighbours]))
        except (MemoryError, RuntimeError) as error:
            if ran_out_of_memory(error):
                return
            raise
        for i in range(_RECORDS):
            _compare(crowd, i, self._beside, i, rounding=1 / 2, how="in a larger batch")

    def judge_beside(self, *kinds: str) -> None:
        """Raise where a record comes out differently beside other neighbours, in the same place of a batch of one size."""
        self._beside = self._rows(together(self._base))
        self._note(range(_RECORDS))
        for number, kind in enumerate(kinds, start=1):
            for i, record in enumerate(self._base):
                batch = [self._probes.record(kind, 10 * number + j) for j in range(_RECORDS)]
                batch[i] = record
                found = self._rows(together(batch))
                self._note([i])
                _compare(found, i, self._beside, i, rounding=2 / 3, how=f"beside neighbours that are {kind}")

    def _rows(self, inputs: Any) -> Sequence[Tensor]:
        """One run, always from the same random state; what it read is kept."""
        with self._generators.repeated():
            if not self._watched:
                return self._run(inputs)
            with _readings() as self._readings:
                return self._run(inputs)

    def _steady(self, inputs: Any) -> bool:
        """Whether a run with other random numbers gives the same rows."""
        with self._generators.repeated(seed=1):
            after = self._run(inputs)
        return len(after) == len(self._beside) and all(map(_equal, after, self._beside))

    def _note(self, held: Iterable[int]) -> None:
        """Remember which conditions the last batch decided otherwise than one of its records alone."""
        for i in held if self._watched else ():
            own, batch = self._alone[i], self._readings
            if len(own) != len(batch) or None in own or None in batch:
                raise DependentRecords("the model reads values of the batch")
            self.decided |= {place for place, value in enumerate(own) if value != batch[place]}


def _compare(found: Sequence[Tensor], i: int, expected: Sequence[Tensor], j: int, *, rounding: float, how: str) -> None:
    """Row i of one run must be row j of another, up to a power of the type's resolution."""
    if len(found) != len(expected):  # layers were called in one run and not in the other
        raise DependentRecords(f"what the model does depends on the values of the batch ({how})")
    for a, b in zip(found, expected, strict=True):
        row, other = a[i].detach(), b[j].detach()
        if row.is_floating_point():
            scale = float(torch.where(other.isfinite(), other, 0.0).abs().max()) if other.numel() else 0.0
            tolerance = torch.finfo(row.dtype).eps ** rounding * scale
            same = row.shape == other.shape and torch.allclose(row, other, rtol=0, atol=tolerance, equal_nan=True)
        else:
            same = torch.equal(row, other)
        if not same:
            raise DependentRecords(f"a record's outputs depend on the other records of the batch ({how})")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, where NaN counts as equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def may_branch(run: Run, example: Any) -> bool:
    """Whether a program may branch on its inputs' values: ``vmap``, which refuses to, cannot run it record by record."""
    inputs = together([_Probes(example, RANGES[0]).record("plain", i) for i in range(_RECORDS)])
    axes = pytree.tree_map(lambda t: 0 if isinstance(t, Tensor) else None, inputs)

    def record(alone: Any) -> list[Tensor]:
        return [rows[0] for rows in run(pytree.tree_map_only(Tensor, lambda t: t[None], alone))]

    try:
        with Generators.of(run).repeated(), torch.enable_grad(), plain_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a rule is slow does not matter here
            vmap(record, in_dims=(axes,), randomness="different")(inputs)
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        return True
    return False


def outputs_alone(module: nn.Module) -> Run:
    """A module's outputs, as ``may_branch`` and ``check_mixing`` want them."""
    return lambda inputs: [outputs_of(call(module, inputs))]


# --- through state --------------------------------------------------------------------------------------------------

_PLAIN = frozenset(vars(nn.Module()))  # what every module has; buffers are looked at one by one


class State:
    """What a forward pass changes in a module, and how it was before.

    Args:
        module: a working copy.
        example: inputs of one record, with a batch dimension of one; shapes and types are all that is used.

    Raises:
        ValueError: a record's outputs change after another one was run, though everything that changed was put back.
    """

    def __init__(self, module: nn.Module, example: Any):
        self._module, self._before, self._generators = module, _contents(module), Generators.of(module)
        self._changed: set[tuple[str, str]] = set()
        probes = _Probes(example, RANGES[0])
        first = probes.record("plain", 0)
        try:
            outputs = self._run(first)
            for number, kind in enumerate(probes.kinds, start=1):
                self._run(probes.record(kind, number))
            self._run(together([first, first]))
            self._changed = _differences(self._before, _contents(module))
            self.restore()
            again = self._run(first)
        except (IndexError, RuntimeError, ValueError, TypeError) as error:
            if ran_out_of_memory(error):
                raise
            again = outputs = torch.empty(0)  # what fails on synthetic records is said where the gatherer is chosen
            self._changed = _differences(self._before, _contents(module))
        self.restore()
        self._judge(outputs, again)

    @staticmethod
    def _judge(outputs: Tensor, again: Tensor) -> None:
        """Raise where the rows of the same record differ between two runs."""
        if not _equal(outputs, again):
            raise ValueError(
                "model gives other outputs for the same record after another one was run: it keeps something from call to "
                "call that is neither a buffer nor an attribute of its layers; make forward() a function of its inputs"
            )

    def _run(self, inputs: Any) -> Tensor:
        with self._generators.repeated(), torch.enable_grad():  # as in a pass
            return outputs_of(call(self._module, pytree.tree_map_only(Tensor, torch.clone, inputs))).detach()

    @property
    def changed(self) -> list[str]:
        """What a forward pass changes, by name."""
        return [f"{layer}.{name}".lstrip(".") for layer, name in sorted(self._changed)]

    def restore(self) -> None:
        """Put back what forward passes change."""
        layers = dict(self._module.named_modules()) if self._changed else {}
        for layer, name in self._changed:
            module = layers[layer]
            held: dict[str, Any] = module._buffers if name in module._buffers else module.__dict__
            if (layer, name) in self._before:
                held[name] = _copied(self._before[layer, name].copy, {})
            else:
                held.pop(name, None)


@dataclass(frozen=True, eq=False)
class _Held:
    """A buffer or attribute: the object itself, how often it was changed in place, and a copy."""

    itself: Any
    version: int
    copy: Any

    def same(self, other: _Held) -> bool:
        """Whether the buffer or attribute is unchanged, as far as can be seen."""
        untouched = self.itself is other.itself or not isinstance(self.itself, Tensor)
        return untouched and self.version == other.version and _same(self.copy, other.copy)


def _contents(module: nn.Module) -> dict[tuple[str, str], _Held]:
    """All buffers and attributes of a module's layers; modules and parameters are no state."""
    shared: dict[int, Any] = {id(thing): thing for thing in (*module.modules(), *module.parameters())}
    found: dict[tuple[str, str], _Held] = {}
    for layer_name, layer in module.named_modules():
        own = {name: value for name, value in vars(layer).items() if name not in _PLAIN}
        for name, value in {**own, **layer._buffers}.items():
            version = value._version if isinstance(value, Tensor) and not value.is_inference() else 0
            found[layer_name, name] = _Held(value, version, _copied(value, shared))
    return found


def _copied(value: Any, shared: dict[int, Any]) -> Any:
    """A deep copy that shares modules and parameters. What cannot be copied is taken as it is."""
    try:
        return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value, shared)
    except Exception:  # whatever an object of the user's raises
        return value


def _differences(
    before: Mapping[tuple[str, str], _Held], after: Mapping[tuple[str, str], _Held]
) -> set[tuple[str, str]]:
    """The names of the buffers and attributes that were changed, added or removed."""
    shared = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {key for key in shared if not before[key].same(after[key])}


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, as far as can be seen."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _equal(a, b)
    if isinstance(a, torch.Generator):  # whose pickles differ though its states do not
        return torch.equal(a.get_state(), b.get_state())
    if type(a) in (list, tuple, deque):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:  # cannot be seen
        return True
