"""No misuse of the loop goes unnoticed: nothing is released, and the epoch can be started again."""

import pytest
import torch
import torch.nn.functional as F
from loops import CLASSES, flat, make_loader, make_loop


# Each function goes wrong in one way; "error" or "warning" and the words that are expected stand beside it.
def skips_a_batch(loop):
    for i, (x, y) in enumerate(loop.loader):
        if i != 1:
            loop.batch(x, y)


def skips_the_first_batch(loop):
    for i, (x, y) in enumerate(loop.loader):
        if i != 0:
            loop.batch(x, y)


def skips_the_last_batch(loop):
    for i, (x, y) in enumerate(loop.loader):
        if i != 2:
            loop.batch(x, y)


def steps_without_backward(loop):
    for x, y in loop.loader:
        loop.criterion(loop.module(x), y)
        loop.optimizer.step()


def steps_without_a_batch(loop):
    loop.optimizer.step()


def forgets_the_last_step(loop):
    for i, (x, y) in enumerate(loop.loader):
        loop.criterion(loop.module(x), y).backward()
        if i < 2:
            loop.optimizer.step()


def counts_a_loss_twice(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loss.backward(retain_graph=True)
        loss.backward()


def counts_a_batch_twice(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        loop.batch(x, y)


def counts_an_earlier_batch(loop):
    losses = [loop.criterion(loop.module(x), y) for x, y in loop.loader]
    losses[0].backward()


def goes_on_after_an_error(loop):
    for x, y in loop.loader:
        with pytest.raises(RuntimeError, match="outputs that went through softmax before"):
            loop.criterion(loop.module(x).softmax(1), y).backward()
        loop.criterion(loop.module(x), y).backward()


def leaves_the_epoch(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        break


def raises_in_the_epoch(loop):
    try:
        for x, y in loop.loader:
            loop.batch(x, y)
            raise KeyError("of the script")
    except KeyError:
        pass


def keeps_the_iterator(loop):
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    other = iter(loop.loader)
    next(other)
    assert iterator is not other


def uses_another_loader(loop):
    for x, y in make_loader():
        loop.batch(x, y)


def mixes_in_another_batch(loop):
    others = iter(make_loader(seed=1))
    for i, (x, y) in enumerate(loop.loader):
        loop.batch(*(next(others) if i == 1 else (x, y)))


def shifts_inputs(loop):
    for x, y in loop.loader:
        loop.batch(x + 1, y)


def scales_inputs_in_place(loop):
    for x, y in loop.loader:
        x.mul_(2)
        loop.batch(x, y)


def scales_inputs_after_the_forward_pass(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        x.mul_(2)
        loss.backward()


def permutes_records(loop):
    for x, y in loop.loader:
        loop.batch(x.flip(0), y.flip(0))


def takes_a_part(loop):
    for x, y in loop.loader:
        loop.batch(x[:4], y[:4])


def repeats_records(loop):
    for x, y in loop.loader:
        loop.batch(torch.cat([x, x]), torch.cat([y, y]))


def changes_targets(loop):
    for x, y in loop.loader:
        loop.batch(x, (y + 1) % CLASSES)


def changes_targets_in_place(loop):
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        y.zero_()
        loss.backward()


def changes_outputs(loop):
    for x, y in loop.loader:
        loop.criterion(loop.module(x) / 2, y).backward()


def adds_a_penalty(loop):
    for x, y in loop.loader:
        (loop.criterion(loop.module(x), y) + 0.1 * loop.module[0].weight.square().sum()).backward()


def adds_to_a_penalty(loop):
    for x, y in loop.loader:
        (0.1 * loop.module[0].weight.square().sum() + loop.criterion(loop.module(x), y)).backward()


def climbs(loop):
    for x, y in loop.loader:
        (-loop.criterion(loop.module(x), y)).backward()


def builds_its_own_loss(loop):
    for x, y in loop.loader:
        (-loop.module(x).log_softmax(1)[:, 0].mean() + 0 * y.sum()).backward()


def uses_another_loss(loop):
    for x, y in loop.loader:
        F.cross_entropy(loop.module(x), y, label_smoothing=0.1).backward()


def uses_another_reduction(loop):
    for x, y in loop.loader:
        F.cross_entropy(loop.module(x), y, reduction="none").mean().backward()


def works_on_the_outputs(loop):
    for x, y in loop.loader:
        loop.criterion(loop.module(x).clamp(-1e6, 1e6), y).backward()


def detaches_the_outputs(loop):
    for x, y in loop.loader:
        F.cross_entropy(loop.module(x).detach(), y).backward()


def works_on_the_outputs_in_place(loop):
    for x, y in loop.loader:
        outputs = loop.module(x)
        outputs.mul_(2)
        loop.criterion(outputs, y).backward()


def writes_into_the_outputs(loop):
    for x, y in loop.loader:
        outputs = loop.module(x)
        outputs[0] = 0.0
        loop.criterion(outputs, y).backward()


def builds_its_own_loss_in_evaluation_mode(loop):
    loop.module.eval()
    for x, y in make_loader():
        F.cross_entropy(loop.module(x), y).backward()


def changes_weights(loop):
    for x, y in loop.loader:
        loop.batch(x, y)
        with torch.no_grad():
            loop.module[0].weight.mul_(1.0)


MISUSES = [
    (skips_a_batch, "error", "left without loss.backward"),
    (skips_the_first_batch, "error", "left without loss.backward"),
    (skips_the_last_batch, "error", "left without loss.backward"),
    (steps_without_backward, "error", r"step\(\) without loss.backward"),
    (steps_without_a_batch, "error", r"step\(\) without a batch"),
    (forgets_the_last_step, "error", r"ended without optimizer.step"),
    (counts_a_loss_twice, "error", "twice for one batch"),
    (counts_a_batch_twice, "error", "twice for one batch"),
    (counts_an_earlier_batch, "error", "left without loss.backward"),
    (goes_on_after_an_error, "error", "was broken off"),
    (leaves_the_epoch, "warning", "left before its end"),
    (raises_in_the_epoch, "warning", "left before its end"),
    (keeps_the_iterator, "warning", "left before its end"),
    (uses_another_loader, "error", "without a batch from the returned data_loader"),
    (mixes_in_another_batch, "error", "inputs that are not those of the batch"),
    (shifts_inputs, "error", "inputs that are not those of the batch"),
    (scales_inputs_in_place, "error", "inputs that are not those of the batch"),
    (scales_inputs_after_the_forward_pass, "error", "changed in place"),
    (permutes_records, "error", "inputs that are not those of the batch"),
    (takes_a_part, "error", "inputs that are not those of the batch"),
    (repeats_records, "error", "inputs that are not those of the batch"),
    (changes_targets, "error", "targets that are not those of the batch"),
    (changes_targets_in_place, "error", "changed in place"),
    (changes_outputs, "error", "outputs that went through div before the criterion"),
    (adds_a_penalty, "error", "regularization="),
    (adds_to_a_penalty, "error", "regularization="),
    (climbs, "error", "only a loss as the criterion gives it"),
    (builds_its_own_loss, "error", "in a way that is not recognised"),
    (builds_its_own_loss_in_evaluation_mode, "error", "in a way that is not recognised"),
    (
        uses_another_loss,
        "error",
        r"loss cross_entropy\(reduction='mean', label_smoothing=0.1\), where the engine knows",
    ),
    (uses_another_reduction, "error", "cross_entropy"),
    (works_on_the_outputs, "error", "outputs that went through clamp before the criterion"),
    (detaches_the_outputs, "error", "outputs that went through detach before"),
    (works_on_the_outputs_in_place, "error", "outputs that went through mul_ before"),
    (writes_into_the_outputs, "error", "outputs that are not those of the returned module"),
    (changes_weights, "error", "changed, moved or frozen during the epoch"),
]


@pytest.mark.parametrize(("misuse", "kind", "words"), MISUSES, ids=lambda value: getattr(value, "__name__", None))
def test_misuse_is_noticed_releases_nothing_and_can_be_made_good(misuse, kind, words, clean):
    loop = make_loop()
    before = flat(loop.module)
    loop.module.train()
    context = pytest.raises(RuntimeError, match=words) if kind == "error" else pytest.warns(UserWarning, match=words)
    with context as caught:
        misuse(loop)
    message = str(caught.value if kind == "error" else caught[0].message)
    advised = ("start the epoch again", "use regularization=", "loss = criterion(module(x), y)")
    assert any(advice in message for advice in advised)  # what to do
    assert loop.engine.accountant.releases == []
    assert torch.equal(flat(loop.module), before)
    assert all(p.grad is None for p in loop.module.parameters())
    loop.epoch()
    assert len(loop.engine.accountant.releases) == 1
    assert loop.engine.get_epsilon(0.0) == 1.0
    torch.testing.assert_close(flat(loop.module), clean, rtol=0, atol=0)


def test_freezing_between_batches_is_noticed():
    loop = make_loop()
    iterator = iter(loop.loader)
    loop.batch(*next(iterator))
    loop.module[0].requires_grad_(False)
    loop.batch(*next(iterator))
    with pytest.raises(RuntimeError, match="changed, moved or frozen"):
        loop.batch(*next(iterator))
    assert loop.engine.accountant.releases == []


def test_a_loss_of_an_earlier_epoch_is_not_counted():
    loop = make_loop(epochs=2)
    for x, y in loop.loader:
        loss = loop.criterion(loop.module(x), y)
        loop.batch(x, y)
    with pytest.raises(RuntimeError, match="Round 1 is drawn"):
        loss.backward()
    with pytest.raises(RuntimeError, match="Round 1 is drawn"):
        loop.optimizer.step()
    for _ in loop.loader:
        with pytest.raises(RuntimeError, match="an epoch that is over"):
            loss.backward()
        break
    loop.epoch()
    assert len(loop.engine.accountant.releases) == 2
