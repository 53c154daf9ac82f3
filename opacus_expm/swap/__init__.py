"""What an unchanged Opacus training loop needs: stand-ins for its objects.

    for epoch in range(E):
        for x, y in data_loader:            # every record once; or samples
            optimizer.zero_grad()           # nothing to do: no parameter has a gradient
            loss = criterion(module(x), y)  # outputs at the present weights; a loss without a number
            loss.backward()                 # the batch's clipped statistics are gathered
            optimizer.step()                # after a round's last batch: charge, draw, move the weights

There are two kinds of loops. With a radius (``Rounds``) **one epoch is one round**: the loader's own batches are counted,
each exactly once, and the step after the last one draws. Without a radius (``Samples``) **one batch is one round**: it is a
Poisson sample of the records, and the step after it draws; an epoch has several.

What the script passes to the module and to the criterion is compared with the batch, record by record: another device, type
or shape is accepted, other values are not. Whatever goes wrong breaks the round off. Of an epoch the statistics are dropped,
nothing is charged or released, and it can be started again from its beginning. A sample is lost: it counts as one without
records, so that no other sample can be chosen in its place, and the loop can go on with the next one.

| what the loop does | one epoch is one round | one batch is one round |
|---|---|---|
| several ``backward()`` for one ``step()`` | accepted: records are added up | an error at the next batch |
| a loss divided by a number | accepted | accepted |
| learning rates, schedulers, ``clip_grad_norm_``, ``GradScaler``, optimizer state | harmless | the same |
| Opacus's ``BatchMemoryManager`` | serves | serves: the step after a batch's last piece is its own |
| evaluation with ``module.eval()`` and ``torch.no_grad()`` | works as always and is not counted | the same |
| iterating over ``data_loader`` in evaluation mode | every record once | the same |
| a batch without ``backward()``, or with two | an error; the epoch is broken off | an error; the sample is lost |
| tensors that are not the batch's, or were changed | an error; the epoch is broken off | an error; the sample is lost |
| an epoch left early, or an exception in the loop | a warning; the epoch is broken off | a warning; the next goes on |
| an epoch without a ``step()`` after its last batch | an error at its end | an error at the next batch |
| parameters changed by the script between epochs | the next round starts there | an error after the first batch |
| ``backward()`` or ``step()`` after the last round | an error | an error |
| a loss that is not the criterion's | an error in its ``backward()`` | the same |

A sample without records is never given to the script: the loop draws it by itself.

In ghost mode the loop is given a criterion. In hooks mode it has its own, whose call the module's outputs recognise
(``swap.outputs``).

The module is the user's own object, as the trained module is in Opacus. Whatever the script has bound to it sees the private
model, its class and the keys of its ``state_dict`` stay the same, and its weights move in place. Until the last round only
its ``forward`` is replaced. It computes without a graph, so that no other optimizer can train the module on the private
data. Private batches run through a copy in evaluation mode that shares the parameters, so that no buffer or attribute of the
module ever depends on them. Copies and pickles of the module are ordinary modules at all times.

Batches are read, and private ones run through the module, with fresh randomness (``gathering.randomness``). The rest of
the script draws from its own generators, which no record moves.

The room knows nothing of the engine. It asks for three protocols, ``Rounds``, ``Samples`` and ``Gathering``, which the
engine fulfils.

**Privacy:** the loop releases what ``make_private_expm`` releases, and nothing else. Losses of private records are not even
computed. Outputs of private records are computed, for the script's own use and at the price of one more forward pass. Like
the records themselves, and like the number of records in a sample, they must not leave the script.
"""

from opacus_expm.swap.epoch import Gathering, Rounds, Samples
from opacus_expm.swap.equivalent import equivalent_call
from opacus_expm.swap.stand_ins import Protocol, originals, stand_ins, unfinished

__all__ = [
    "Gathering",
    "Protocol",
    "Rounds",
    "Samples",
    "equivalent_call",
    "originals",
    "stand_ins",
    "unfinished",
]
