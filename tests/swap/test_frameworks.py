"""Loops that others have written: the recipes of the page on training loops, run as they stand there."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from loops import flat, make_loop, make_model, make_sampled
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 4

pytestmark = pytest.mark.filterwarnings("ignore:with .* records:UserWarning")


def recipe(word):
    """The indented block of the page that has a word in it."""
    page = (Path(__file__).parents[2] / "docs" / "pages" / "swap.md").read_text(encoding="utf-8")
    found = [block for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page, flags=re.MULTILINE) if word in block]
    assert len(found) == 1
    return textwrap.dedent(found[0])


class Fetcher:
    """Trains in Lightning's way: the optimizer is given a closure, and the length of an epoch is what the loader says."""

    def __init__(self, epochs):
        self.epochs, self.logged = epochs, []

    def fit(self, step, optimizer, loader):
        for _ in range(self.epochs):
            iterator = iter(loader)
            for _ in range(len(loader)):
                batch = next(iterator, None)
                if batch is None:
                    break

                def closure(batch=batch):
                    loss = step(batch)
                    optimizer.zero_grad()
                    loss.backward()
                    return loss

                assert isinstance(optimizer.step(closure), torch.Tensor)
                self.logged.append(step(batch).detach())


def test_a_closure_and_a_known_length():
    plain, own = make_sampled(epochs=EPOCHS), make_sampled(epochs=EPOCHS, grad_sample_mode="hooks")
    for _ in range(EPOCHS):
        plain.epoch()
    own.module.train()
    trainer = Fetcher(EPOCHS)
    trainer.fit(lambda batch: F.cross_entropy(own.module(batch[0]), batch[1]), own.optimizer, own.loader)
    assert torch.equal(flat(own.module), flat(plain.module))
    assert f"{torch.stack(trainer.logged[:-1]).mean():.2f}" == "private"


def test_a_lightning_module_is_refused():
    class LightningModule(nn.Module):
        """Has the name."""

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = make_model()

    with pytest.raises(ValueError, match=r"module is a LightningModule.*keep the network in an attribute"):
        make_loop(model=Classifier())


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    plain, own = make_sampled(epochs=EPOCHS), make_sampled(epochs=EPOCHS, grad_sample_mode="hooks")
    for _ in range(EPOCHS):
        plain.epoch()
    names = {"lightning": lightning, "torch": torch, "epochs": EPOCHS, "module": own.module}
    exec(recipe("LightningModule"), names | {"optimizer": own.optimizer, "data_loader": own.loader})
    assert torch.equal(flat(own.module), flat(plain.module))


class Texts(Dataset):
    """Tokens and labels, as mappings."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = torch.randint(1, 20, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 2}


@pytest.mark.slow
def test_a_trainer_of_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def prepared():
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **sizes))
        model.bert.requires_grad_(False)
        head = torch.optim.AdamW(model.classifier.parameters())
        loader = DataLoader(Texts(), batch_size=8)
        return make_sampled(model=model, loader=loader, optimizer=head, epochs=2, grad_sample_mode="hooks")

    plain, own = prepared(), prepared()
    plain.module.train()
    for _ in range(2):
        for batch in plain.loader:
            labels = batch.pop("labels")
            F.cross_entropy(plain.module(**batch).logits, labels).backward()
            plain.optimizer.step()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True
    )
    names = {"Trainer": transformers.Trainer, "torch": torch, "module": own.module, "arguments": arguments}
    exec(recipe("PrivateTrainer"), names | {"optimizer": own.optimizer, "data_loader": own.loader, "public": Texts()})
    assert torch.equal(flat(own.module), flat(plain.module))
    assert own.engine.accountant.releases == plain.engine.accountant.releases
