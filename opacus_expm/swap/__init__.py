"""What an unchanged Opacus training loop needs: stand-ins for its four objects, with which one epoch is one round.

    for epoch in range(T):
        for x, y in data_loader:            # every record once
            optimizer.zero_grad()           # nothing to do: no parameter has a gradient
            loss = criterion(module(x), y)  # outputs at the present weights; a loss without a number
            loss.backward()                 # the batch's clipped statistics are gathered
            optimizer.step()                # after the epoch's last batch: charge, draw, move the weights

The loader's own batches are counted, each exactly once. What the script passes to the module and to the criterion is
compared with the batch, record by record: another device, type or shape is accepted, other values are not. Whatever goes
wrong breaks the epoch off: its statistics are dropped, nothing is charged or released, and the epoch can be started again
from its beginning.

| what the loop does | what happens |
|---|---|
| several ``backward()`` for one ``step()``, loss divided by a number | accepted: records are added up all the same |
| learning rates, schedulers, ``clip_grad_norm_``, optimizer state | harmless: no gradient step is taken |
| evaluation with ``module.eval()`` and ``torch.no_grad()`` | works as always and is not counted |
| a batch without ``backward()``, or with two | the epoch is broken off, and an error says so |
| tensors that are not the batch's, or whose values were changed | the epoch is broken off, and an error says so |
| an epoch left early, or an exception in the loop | the epoch is broken off, and a warning says so |
| an epoch without a ``step()`` after its last batch | an error at its end |
| ``backward()`` or ``step()`` after the last round | an error |
| a loss that the returned criterion did not build | an error in its ``backward()`` |

The module is the user's own object, as the trained module is in Opacus. Whatever the script has bound to it sees the private
model, its class and the keys of its ``state_dict`` stay the same, and its weights move in place. Until the last round only
its ``forward`` is replaced. It computes without a graph, so that no other optimizer can train the module on the private
data. Private batches run through a copy in evaluation mode that shares the parameters, so that no buffer or attribute of the
module ever depends on them. Copies and pickles of the module are ordinary modules at all times.

Batches are read, and private ones run through the module, with fresh randomness (``gathering.randomness``). The rest of
the script draws from its own generators, which no record moves.

The room knows nothing of the engine. It asks for two protocols, ``Rounds`` and ``Gathering``, which the engine fulfils.

**Privacy:** the loop releases what ``make_private_expm(..., rounds=T)`` releases, and nothing else. Losses of private
records are not even computed. Outputs of private records are computed, for the script's own use and at the price of one more
forward pass. Like the records themselves they must not leave the script.
"""

from opacus_expm.swap.epoch import Gathering, Rounds, Samples
from opacus_expm.swap.stand_ins import Protocol, StandIns, originals, stand_ins, unfinished

__all__ = ["Gathering", "Protocol", "Rounds", "Samples", "StandIns", "originals", "stand_ins", "unfinished"]
