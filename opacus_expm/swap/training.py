"""The state of a training loop as a whole: what its loader, module, criterion and optimizer do.

**Privacy:** everything here is private data. It leaves through the draws of ``Rounds`` alone, which charge first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus_expm import _warnings
from opacus_expm._private import PrivateValues
from opacus_expm.gathering import loaders
from opacus_expm.gathering.passes import Pass
from opacus_expm.swap.epoch import UNCHANGED, Epoch, Gathering, Loss, Rounds, Samples, known_batches
from opacus_expm.swap.forward import Forward
from opacus_expm.swap.losses import PrivateLoss, Ticket
from opacus_expm.swap.outputs import LossCall, Outputs, known
from opacus_expm.swap.tensors import changed_since, fingerprint, tensors_of

_AGAIN = "Nothing was released; start the epoch again from its beginning (for ... in data_loader)"
_LOST = "The sample is lost and counts as one without records; the loop can go on with the next one (for ... in data_loader)"
_ANOTHER_LOSS = (
    "backward() for the loss {}, where the engine knows {}, with which it measures and which it counts. Pass the loss of "
    "the loop to make_private_with_epsilon as criterion=; without it, it is nn.CrossEntropyLoss()."
)


class Training(PrivateValues):
    """The state of a loop, which its four stand-ins share.

    Args:
        module: the user's own; its ``forward`` is replaced until the last round.
        criterion: the loss.
        loader: private data, every record once.
        rounds: what to gather and draw.
    """

    def __init__(self, module: nn.Module, criterion: Loss, loader: DataLoader[Any], rounds: Rounds):
        self.module, self.rounds = module, rounds
        self._criterion, self._call, self._loader = criterion, known(criterion), loader
        self._plain: DataLoader[Any] | None = None  # made of the loader's parts, and iterated in its place
        self._size = 0  # of its batches, where it is not the loader's
        self._round: Gathering | None = rounds.begin(module, 0)
        self._begun_at = fingerprint(module)
        self._number = 0
        self._samples = rounds if isinstance(rounds, Samples) else None
        self._again = _AGAIN if self._samples is None else _LOST
        self._given = False  # whether the script has a sample that was not drawn
        self._placed: dict[str, Tensor] | None = None  # the weights of the last draw
        self._epoch: Epoch | None = None
        self._ended: str | None = None
        self._zeros: list[nn.Parameter] = []  # whose gradients are zeros, for a gradient scaler
        self._forward = Forward(module, self)

    def __repr__(self) -> str:
        state = "" if self._ended is None else ", ended"
        return f"Training({self._number} of {self.rounds.count} rounds drawn{state})"

    @staticmethod
    def of(module: nn.Module) -> Training | None:
        """The unfinished loop that a module is in."""
        forward = vars(module).get("forward")
        loop = forward.loop if isinstance(forward, Forward) else None
        return loop if isinstance(loop, Training) else None

    def start(self) -> None:
        """Replace the module's ``forward``, and end an unfinished loop of the same module.

        Scripts reach through Opacus's wrapper by ``module._module``, which is the module itself here, also when the loop is
        over. It is no submodule: names of parameters and the state_dict are as before.
        """
        earlier = Training.of(self.module)
        if earlier is not None:
            earlier.end(
                "make_private_with_epsilon was called again for this module, which ended this loop; go on with the objects "
                "that it returned"
            )
        if not hasattr(self.module, "_module"):
            object.__setattr__(self.module, "_module", self.module)
        self._forward.install()

    def end(self, message: str) -> None:
        """Make the module an ordinary one again; from now on ``backward`` and ``step`` are refused with this message."""
        if self._epoch is not None:
            self._epoch.break_off(message)
        self._ended = message
        self._epoch = self._round = self._plain = None
        self.rounds.end()
        self._forward.remove()

    # What the loader does.

    @property
    def _samples_now(self) -> Samples | None:
        """The rounds over samples if an iteration would be one of training; None if it would be of every record once."""
        training = self.module.training and torch.is_grad_enabled()
        return self._samples if training and self._ended is None else None

    @property
    def kind(self) -> str:
        """What an iteration gives."""
        return "every record once" if self._samples_now is None else "Poisson samples"

    def length(self, size: int = 0) -> int:
        """How many batches an iteration gives, at the most; in pieces of ``size`` records about as many."""
        samples, records = self._samples_now, loaders.dataset_size(self._loader)
        batches = len(self._loader) if samples is None else samples.longest
        return batches if not size or records is None else max(batches, -(-records // size))

    def batches(self, size: int = 0) -> Iterator[Any]:
        """One epoch: every batch of the loader once, or its samples; or pieces of them with at most ``size`` records."""
        samples = self._samples_now
        if samples is not None:
            return self._sampled(samples, size)
        seen = "It was begun with module.eval() or torch.no_grad(); call module.train() first."
        return self._whole(Epoch(loaders.dataset_size(self._loader), None if self._samples is None else seen), size)

    def _whole(self, epoch: Epoch, size: int) -> Iterator[Any]:
        """Every batch of the loader once."""
        if self._epoch is not None:
            self._leave(self._epoch)
        self._epoch = epoch
        self._forward.forget_copy()
        size = min(size, loaders.batch_size(self._loader) or size)
        if self._plain is None or size != self._size or not self._loader.persistent_workers:
            self._plain, self._size = loaders.each_alone(self._loader, "data_loader", size), size
        try:
            for batch, tensors, last in known_batches(self._plain):
                epoch.give(tensors, last)
                yield batch
                if epoch.broken is None and 0 < epoch.counted < epoch.number:
                    self._fail(epoch, "A batch was left without loss.backward(), but every record has to be counted.")
            if epoch.broken is None and epoch.counted and not epoch.drawn:
                self._fail(
                    epoch, "The epoch ended without optimizer.step() after its last batch, so nothing was drawn."
                )
        finally:
            epoch.forget()
            self._leave(epoch)

    def _sampled(self, samples: Samples, size: int) -> Iterator[Any]:
        """The samples of one epoch, each of them one batch; a sample without records is drawn here, and not given."""
        self._forward.forget_copy()
        self._settle(samples)
        end = samples.until(self._number) if self._ended is None else 0
        try:
            while self._ended is None and self._number < end:
                sample = self._take(samples, size)
                if sample is None:
                    continue
                epoch = self._epoch = Epoch(loaders.dataset_size(sample))
                try:
                    yield from self._pieces(epoch, sample)
                finally:
                    epoch.forget()
                if self._ended is not None and not epoch.drawn:
                    raise RuntimeError(self._ended)
                if not epoch.drawn:
                    self._fail(
                        epoch, epoch.broken or "A batch was left without loss.backward() and optimizer.step() after it."
                    )
        except GeneratorExit:
            self._warn_if_left(end)
            raise

    def _pieces(self, epoch: Epoch, sample: DataLoader[Any]) -> Iterator[Any]:
        """A sample's records, of which the script counts every piece; the last one is followed by the step."""
        for batch, tensors, last in known_batches(sample):
            epoch.give(tensors, last)
            yield batch
            if epoch.broken is None and not last and epoch.counted < epoch.number:
                self._fail(epoch, "A batch was left without loss.backward(), but every record has to be counted.")

    def _settle(self, samples: Samples) -> None:
        """Draw without its records a sample that was given to the script and lost."""
        if self._given and self._ended is None:
            if self._epoch is not None:
                self._epoch.break_off("Another iteration of data_loader was begun.")
            self._move(samples.draw_empty)

    def _take(self, samples: Samples, size: int) -> DataLoader[Any] | None:
        """The next sample; None where it has no records and was drawn at once. The first one opens the run."""
        if self._placed is None and fingerprint(self.module) != self._begun_at:
            self._round, self._begun_at = samples.begin(self.module, 0), fingerprint(self.module)
        self._check_placed()
        try:
            sample = samples.sample(size)
        except BaseException:
            self.end(
                "What comes before a sample failed, and with it the run: what was charged stays charged. Call "
                "make_private_with_epsilon again for what is left of the budget"
            )
            raise
        if self._placed is None:
            self._placed = self._weights()
        if sample is None:
            self._move(samples.draw_empty)
            return None
        self._given = True
        return sample

    def _weights(self) -> dict[str, Tensor]:
        """The weights that move, as they are now."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}

    def _check_placed(self) -> None:
        """Raise where the script has changed the weights of a run that has begun."""
        now, placed = self._weights(), self._placed
        if placed is None:
            return
        if now.keys() != placed.keys() or not all(torch.equal(now[n].to(t), t) for n, t in placed.items()):
            raise RuntimeError(
                "The module's parameters were changed or frozen after the first batch of the run, which goes on from those "
                "that were drawn last. Give them back their values; or, to start from these, call "
                "make_private_with_epsilon again, with a budget for it"
            )

    def _warn_if_left(self, end: int) -> None:
        """Say that an epoch of samples was left before its end."""
        told = self._epoch is not None and self._epoch.broken is not None
        if self._ended is None and self._number < end and not told and not sys.is_finalizing():
            _warnings.warn(
                "an epoch of the private loop was left before its end. The whole run stays charged, and the weights, which "
                "are those of the last draw, are final only when the run is complete: another epoch goes on from here"
            )

    def _leave(self, epoch: Epoch) -> None:
        """Break off an epoch of which only a part was counted, and warn."""
        if epoch.broken is not None or epoch.drawn or not epoch.counted:
            return
        epoch.break_off("It was left before its last batch was counted.")
        if not sys.is_finalizing():
            _warnings.warn(
                "an epoch of the private loop was left before its end and does not count. "
                f"{self._again}; every round needs all batches"
            )

    def _fail(self, epoch: Epoch | None, message: str) -> NoReturn:
        """Break the epoch off and say why."""
        if epoch is not None:
            epoch.break_off(message)
        raise RuntimeError(f"{message} {self._again}")

    def _open(self) -> Epoch | None:
        """The present epoch; an error if it is over, or the whole loop."""
        epoch = self._epoch
        if self._ended is not None:
            raise RuntimeError(self._ended)
        if epoch is not None and epoch.drawn:
            over, what = ("its epoch", "one") if self._samples is None else ("its batch", "batch")
            raise RuntimeError(
                f"Round {self._number} is drawn and {over} over; the next needs another {what} (for ... in data_loader)"
            )
        if epoch is not None and epoch.broken is not None:
            raise RuntimeError(f"This epoch was broken off: {epoch.broken} {self._again}")
        return epoch

    # What the module and the criterion do.

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the module, and remember it if it was with the present batch."""
        epoch = self._epoch
        private = epoch is not None and epoch.unchanged(tensors_of((args, kwargs)))
        result = self._forward.compute(args, kwargs, private=private)
        if private and epoch is not None:
            outputs = tensors_of((result, getattr(result, "logits", None)))
            epoch.remember_call(self._forward.as_inputs(args, kwargs), outputs)
        return result

    def loss(self, outputs: Tensor, targets: Tensor, call: LossCall | None = None) -> Tensor:
        """A private loss, whose ``backward`` counts the batch; an ordinary one where other data is evaluated.

        Args:
            outputs: of the module.
            targets: what they should be.
            call: of a loss by which the script computes it; None for the criterion that it was given.
        """
        epoch = self._epoch or Epoch()
        ticket = epoch.ticket(outputs, targets)
        evaluated = not (torch.is_grad_enabled() and self.module.training)
        if evaluated and not isinstance(ticket, Ticket) and not epoch.gave(targets):
            plain = outputs.plain() if isinstance(outputs, Outputs) else outputs
            return (call or self._criterion)(plain, targets)
        if call is not None and (self._call is None or not call.same(self._call)):
            ticket = _ANOTHER_LOSS.format(call, self._call or self._criterion)
        return PrivateLoss.of(self.count, ticket, self._forward.anchor)

    def count(self, ticket: Ticket | str, scaled: bool = False) -> None:
        """Add the statistics of a batch. It must be the present one, and not yet counted.

        Args:
            ticket: what the loss was built from.
            scaled: whether a gradient scaler is going to look for gradients until the next step; it finds zeros.
        """
        epoch = self._open()
        if not isinstance(ticket, Ticket):
            self._fail(epoch, ticket)
        if epoch is None or ticket.epoch is not epoch:
            self._fail(epoch, "backward() for a loss of an epoch that is over.")
        if epoch.counted == ticket.number:
            self._fail(epoch, "backward() was called twice for one batch, but every record counts once.")
        if epoch.counted != ticket.number - 1 or ticket.number != epoch.number:
            self._fail(epoch, "A batch was left without loss.backward(), but every record has to be counted.")
        if changed_since(ticket.held):
            self._fail(epoch, f"backward() for a batch that was changed in place. {UNCHANGED}.")
        try:
            if epoch.gathered is None:
                epoch.gathered = self._begin(epoch)
            epoch.gathered.add(ticket.inputs, ticket.targets)
            epoch.counted += 1
            self._zeros = [p for p in self.module.parameters() if p.requires_grad and p.grad is None] if scaled else []
            for p in self._zeros:
                p.grad = torch.zeros_like(p)
        except BaseException:  # an interrupt, too, must not leave a batch half counted, or hooks half attached
            epoch.break_off("An exception was raised in backward().")
            self._round = None
            raise

    def _begin(self, epoch: Epoch) -> Pass:
        """The pass of an epoch whose first batch is counted: the round starts from the weights that the module has now."""
        now = fingerprint(self.module)
        if self._round is None or (self._samples is None and now != self._begun_at):
            self._round, self._begun_at = self.rounds.begin(self.module, self._number), now
        epoch.parameters = fingerprint(self.module, buffers=False)
        return self._round.open()

    # What the optimizer does.

    def step(self) -> None:
        """After the epoch's last batch charge, draw and move the weights; before it, do nothing."""
        while self._zeros:
            self._zeros.pop().grad = None
        epoch = self._open()
        if epoch is None or epoch.number == 0:
            self._fail(None, "optimizer.step() without a batch from the returned data_loader.")
        if epoch.counted != epoch.number:
            self._fail(
                epoch, "optimizer.step() without loss.backward() for the batch, but every record has to be counted."
            )
        if not epoch.last:
            return
        assert epoch.gathered is not None
        if epoch.expected is not None and epoch.gathered.records != epoch.expected:
            self._fail(
                epoch,
                "data_loader did not yield every record once: its collate function must keep all records of a batch.",
            )
        if fingerprint(self.module, buffers=False) != epoch.parameters:
            self._fail(
                epoch,
                "The module's parameters were changed, moved or frozen during the epoch; do that between epochs, in which "
                "case the next round starts from them.",
            )
        self._draw(epoch)

    def _draw(self, epoch: Epoch) -> None:
        """Charge, draw, and move the weights."""
        assert epoch.gathered is not None
        gathered = epoch.gathered
        epoch.drawn, epoch.gathered = True, None
        self._move(lambda number: self.rounds.draw(gathered.result(), number))

    def _move(self, draw: Callable[[int], nn.Module]) -> None:
        """Give the module the weights of the next draw, which is told its number."""
        number = self._number
        own = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        before = self._weights()
        try:
            # Over before it is drawn: whatever happens, no round is drawn twice.
            self._number, self._round, self._given = number + 1, None, False
            _copy_into(own, dict(draw(number).named_parameters()))
        except BaseException:
            _copy_into(own, before)  # not a part of the release either
            self.end(
                f"The draw of round {number + 1} failed, and with it the run: what was charged stays charged. Call "
                "make_private_with_epsilon again for what is left of the budget"
            )
            raise
        if self._samples is not None:
            self._placed = self._weights()
        if self._number == self.rounds.count:
            epochs = f"(epochs={self._number})" if self._samples is None else ""
            self.end(
                f"All {self._number} rounds of make_private_with_epsilon{epochs} are drawn and the module is "
                "final: another epoch would be another release. Call make_private_with_epsilon again, with a budget for it"
            )


@torch.no_grad()
def _copy_into(parameters: dict[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Give parameters new values in place."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
