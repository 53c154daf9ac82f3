"""Hugging Face classifiers and LoRA adapters, small and untrained, against plain autograd one record at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from reference import random_map
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    default_data_collator,
)

from opacus_expm import ExpMQuadEngine, Sparse
from opacus_expm.subspaces.layout import Layout

DIM, C_G, C_H = 6, 0.05, 0.01


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def distilbert():
    torch.manual_seed(1)
    config = DistilBertConfig(
        vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=12, num_labels=3
    )
    return DistilBertForSequenceClassification(config)


def lora():
    torch.manual_seed(2)
    adapted = get_peft_model(bert(), LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))
    with torch.no_grad():  # LoRA starts with B = 0, where half of its gradients vanish
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return adapted


class Texts(Dataset):
    """Token ids with padding, a mask and labels, as mappings."""

    def __init__(self, n=7):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 40, (n, 9), generator=generator)
        self.lengths = torch.randint(3, 10, (n,), generator=generator)
        self.labels = torch.randint(3, (n,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        mask = (torch.arange(9) < self.lengths[i]).long()
        return {"input_ids": self.ids[i] * mask, "attention_mask": mask, "labels": self.labels[i]}


def expected_sums(model, texts, projection):
    """G and S by autograd, one record at a time, in float64."""
    model = copy.deepcopy(model).double().eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total_g, total_s = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, DIM, dtype=torch.float64)

    def project(gradients):
        out = torch.zeros(1, DIM, dtype=torch.float64)
        flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                          for g, p in zip(gradients, parameters, strict=True)])  # fmt: skip
        projection.add_projected(out, flat[None], 0)
        return out[0]

    for i in range(len(texts)):
        record = texts[i]
        label = record.pop("labels")
        logits = model(**{k: v[None] for k, v in record.items()}).logits[0]
        rows = torch.stack([
            project(torch.autograd.grad(o, parameters, retain_graph=True, allow_unused=True)) for o in logits
        ])  # fmt: skip
        sigma = torch.softmax(logits.detach(), 0)
        g = rows.T @ (sigma - F.one_hot(label, 3))
        h = rows.T @ (torch.diag(sigma) - torch.outer(sigma, sigma)) @ rows
        total_g += g * min(1.0, C_G / float(g.norm()))
        total_s += h * min(1.0, C_H / float(torch.linalg.eigvalsh(h)[-1]))
    return total_g, total_s


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("build", [bert, distilbert, lora], ids=lambda b: b.__name__)
def test_classifiers_agree_with_autograd(build, dtype):
    model, texts = build().to(dtype), Texts()
    projection = random_map("sparse", Layout.of(model).size, DIM, 5)
    expected_g, expected_s = expected_sums(model, texts, projection)
    found = ExpMQuadEngine().gather(
        model, DataLoader(texts, batch_size=4), DIM, criterion=torch.nn.CrossEntropyLoss(), projection=Sparse(seed=5),
        max_grad_norm=C_G, max_curvature=C_H, grad_sample_mode="hooks",
    ).sums  # fmt: skip
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    assert (found.gradient - expected_g).abs().max() <= tolerance * expected_g.abs().max()
    assert (found.curvature - expected_s).abs().max() <= tolerance * expected_s.abs().max()


def test_lora_release_moves_the_adapters_only():
    model, texts = lora(), Texts()
    engine = ExpMQuadEngine()
    private = engine.make_private_expm(
        model, DataLoader(texts, batch_size=4), 1.0, 0.5, DIM, criterion=torch.nn.CrossEntropyLoss(),
        projection="sparse", max_grad_norm=1.0, max_curvature=1.0,
    )  # fmt: skip
    assert type(private) is type(model)
    before = dict(model.named_parameters())
    for name, p in private.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
    assert engine.get_epsilon() == 1.0


class Unpadded(Texts):
    """The same texts as lists of their own lengths, as a tokenizer gives them."""

    def __getitem__(self, i):
        length = int(self.lengths[i])
        return {
            "input_ids": self.ids[i, :length].tolist(),
            "attention_mask": [1] * length,
            "labels": int(self.labels[i]),
        }


def sums_of(loader):
    options = {"criterion": torch.nn.CrossEntropyLoss(), "projection": Sparse(seed=5)}
    return ExpMQuadEngine().gather(bert(), loader, DIM, max_grad_norm=C_G, max_curvature=C_H, **options).sums


def test_collators_with_a_public_length_give_the_same_sums(tmp_path):
    """Padding to the longest text of a batch is refused: its length would depend on the others."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    expected = sums_of(DataLoader(Texts(), batch_size=4))
    public = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=9)
    for loader in (
        DataLoader(Unpadded(), batch_size=4, collate_fn=public),
        DataLoader(Texts(), batch_size=4, collate_fn=default_data_collator),
    ):
        found = sums_of(loader)
        torch.testing.assert_close(found.gradient, expected.gradient, rtol=0, atol=0)
        torch.testing.assert_close(found.curvature, expected.curvature, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"another shape beside other records.*padding='max_length'"):
        sums_of(DataLoader(Unpadded(), batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer)))
