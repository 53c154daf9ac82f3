"""The processes that share one pass: ``torch.distributed``'s ranks.

Every rank makes the same calls. Each gathers the statistics of its own records, the sums are added up over all ranks,
and the leading rank alone charges and draws; the others receive the draw.

**What crosses the network:** for a pass the k + k(k+1)/2 numbers of its sums and one count, in float64; for a bought bound
the counts of norms below the points of a fixed grid; for a draw k numbers; and digests of public facts. Records never
do. The network between the ranks is part of the trusted side: sums and counts are private data.

**Failure:** every exchange begins with a word from every rank that it got this far. A rank that raised says so instead,
and all others raise ``RankFailed``; a rank that was killed or hangs breaks the exchange, at the latest after the process
group's timeout (``init_process_group(timeout=...)``). The charge comes after the word of every rank that its pass is
done, so a rank that fails in the pass leaves nothing charged, and one that fails later leaves nothing released.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm.gathering import loaders
from opacus_expm.gathering.model import digest, tensor_digest, unwrap

_DIGEST = hashlib.sha256().digest_size


class RankFailed(RuntimeError):
    """Another rank failed or did not answer; nothing was released."""


class Ranks:
    """This process and the others of its group.

    Args:
        several: whether to share the work with the default process group's other ranks. A process on its own is its own
            answer in every exchange.
    """

    def __init__(self, several: bool = False):
        self.rank = dist.get_rank() if several else 0
        self.count = dist.get_world_size() if several else 1

    @classmethod
    def current(cls, distributed: bool | None) -> Ranks:
        """The ranks of the default process group where there is one (unless ``distributed`` is False).

        Raises:
            ValueError: ``distributed=True`` without a process group.
        """
        initialised = dist.is_available() and dist.is_initialized()
        if distributed and not initialised:
            raise ValueError(
                "distributed=True needs torch.distributed.init_process_group(...) first, as torchrun's processes call it; "
                "leave distributed out to work alone where it was not called"
            )
        return cls(several=initialised and distributed is not False)

    @property
    def leads(self) -> bool:
        """Whether this rank charges and draws."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that succeeds on every rank or fails on every rank.

        Raises:
            RankFailed: another rank did not reach the end.
        """
        try:
            yield
        except RankFailed:
            raise
        except BaseException:
            with suppress(RankFailed):  # this rank's own reason is the better one
                self.ready(failed=True)
            raise
        self.ready()

    def ready(self, *, failed: bool = False) -> None:
        """Tell the other ranks whether this one succeeded, and raise if another one failed.

        Raises:
            RankFailed: another rank failed.
        """
        if self.count == 1:
            return
        word = torch.tensor([self.rank + 1 if failed else 0], device="cpu")
        self._exchange(lambda group: dist.all_reduce(word, dist.ReduceOp.MAX, group))
        if int(word) and not failed:
            raise RankFailed(
                f"rank {int(word) - 1} failed, and with it the work of all ranks: nothing was released; that rank's own "
                "error says why"
            )

    def _exchange(self, collective: Callable[[dist.ProcessGroup], object]) -> None:
        """One call to torch.distributed, whose failure means that a rank is gone."""
        world = dist.group.WORLD
        assert world is not None
        try:
            collective(_carrier(world))
        except RuntimeError as error:
            raise RankFailed(
                f"rank {self.rank} waited in vain: another rank ended, or did not make the same call within the process "
                "group's timeout; nothing was released. Every rank has to make the same calls of the engine "
                "(ExpMQuadEngine(distributed=False) works in one process alone)"
            ) from error

    def same(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Refuse, on all ranks alike, facts that differ between them.

        Args:
            facts: name → what is compared, by ``repr``; the same names on every rank. Only digests are exchanged.

        Raises:
            ValueError: naming the facts that differ, not their values.
        """
        if self.count == 1:
            return
        here = facts()
        digests = self._from_all(b"".join(hashlib.sha256(repr(value).encode()).digest() for value in here.values()))
        differing = [
            name for i, name in enumerate(here) if len({d[i * _DIGEST : (i + 1) * _DIGEST] for d in digests}) > 1
        ]
        if differing:
            raise ValueError(
                f"{', '.join(differing)} must be the same on every rank, and is not; nothing was gathered or charged"
            )

    def _from_all(self, content: bytes) -> list[bytes]:
        """The contents of all ranks, in the order of ranks; all have the same length."""
        self.ready()
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(self.count)]
        self._exchange(lambda group: dist.all_gather(everyone, own, group))
        return [t.numpy().tobytes() for t in everyone]

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in float64 on the CPU; the same bits on every rank."""
        if self.count == 1:
            return values
        total = values.to("cpu", torch.float64, copy=True)
        self.ready()
        self._exchange(lambda group: dist.all_reduce(total, dist.ReduceOp.SUM, group))
        return total

    def from_leader(self, values: Tensor) -> Tensor:
        """The leading rank's values, on the CPU, whatever stands in those of the others."""
        if self.count == 1:
            return values
        received = values.to("cpu", copy=True)
        self.ready()
        self._exchange(lambda group: dist.broadcast(received, 0, group))
        return received

    def random_name(self) -> str:
        """Sixteen random digits, the same on every rank."""
        return f"{int(self.from_leader(torch.tensor([secrets.randbits(63)]))):016x}"

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Make public tensors, in place, those of the leading rank; they are sent only where a bit differs.

        Ranks on one kind of machine compute the same bits from the same numbers; on several kinds they need not.

        Raises:
            ValueError: shapes differ.
        """
        if self.count == 1:
            return
        self.same(lambda: {"the shape of what is computed from public data": [(t.shape, t.dtype) for t in tensors]})
        if len(set(self._from_all(bytes.fromhex(tensor_digest(*tensors))))) > 1:
            for tensor in tensors:
                tensor.data.copy_(self.from_leader(tensor.detach().cpu().contiguous()))


# By the group that it stands beside. Held weakly: a group that outlives its process group ends in an abort at exit.
_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _carrier(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that carries the exchanges: gloo's, which raises where a rank fails and takes tensors of the CPU."""
    if "cpu:gloo" in str(dist.get_backend_config(world)):
        return world
    if world not in _BESIDE:
        _BESIDE[world] = dist.new_group(backend="gloo")
    return _BESIDE[world]


def described(value: object) -> object:
    """What has to be the same on every rank for an argument: a module's weights, a loader's size, another value's repr.

    A loader's records are not compared: that all ranks see one data set in one order is the caller's word.
    """
    if isinstance(value, nn.modules.loss._Loss):
        options = {name: option for name, option in vars(value).items() if isinstance(option, bool | int | float | str)}
        return type(value).__qualname__, digest(value), options
    if isinstance(value, nn.Module):
        return type(unwrap(value)).__qualname__, digest(unwrap(value))
    if isinstance(value, DataLoader):
        return type(value.dataset).__qualname__, loaders.visited(value)
    if callable(value) or type(value).__repr__ is object.__repr__:  # whose words would hold an address
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value
