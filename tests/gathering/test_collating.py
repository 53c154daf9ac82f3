"""Collate functions: tried on made-up records, and shown one private record at a time whatever they do."""

import random
import re
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from records_of_all_kinds import Fetched, Listed
from torch import nn
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from transformers import (
    BertTokenizerFast,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from opacus_expm import ExpMQuadEngine
from opacus_expm.gathering import loaders
from opacus_expm.gathering.collating import Alone, alike, joined, try_on_made_up_records

BOUND = 0.05
IMAGE = (torch.zeros(3, 8, 8), 1)
SEQUENCE = (torch.zeros(5, 2), torch.tensor(1.0))
TOKENS = {"input_ids": [2, 5, 6, 3], "attention_mask": [1, 1, 1, 1], "labels": 1}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "to", "sun", "tree", "river"]
Pair = namedtuple("Pair", "x y")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return BertTokenizerFast(str(path))


# --- collate functions that people write -----------------------------------------------------------------------------


def stacked(records):
    x, y = zip(*records, strict=True)
    return torch.stack(x), torch.as_tensor(y)


def columns(change):
    """A function of the whole batch, after ``default_collate``."""
    return lambda records: change(*default_collate(records))


def padded(records):
    return pad_sequence([x for x, _ in records], batch_first=True), torch.stack([y for _, y in records])


def padded_to_eight(records):
    x, y = padded(records)
    return pad(x, (0, 0, 0, -x.shape[1] % 8)), y


def padded_to(length):
    def collate(records):
        return torch.stack([pad(x, (0, 0, 0, length - len(x))) for x, _ in records]), torch.stack(
            [y for _, y in records]
        )

    return collate


def trimmed(records):
    """Columns in which no record of the batch has a token are cut off."""
    ids, mask, y = default_collate(records)
    width = int(mask.sum(1).max())
    return (ids[:, :width], mask[:, :width]), y


def largest_only(records):
    """As many rows as records, but all of one of them."""
    return default_collate([max(records, key=lambda r: float(r[0].norm()))] * len(records))


def mixed(x, y):
    share = torch.rand(())
    return share * x + (1 - share) * x.roll(1, 0), y


def running_mean():
    mean = [0.0]

    def collate(records):
        x, y = default_collate(records)
        mean[0] += 0.1 * (float(x.mean()) - mean[0])
        return x - mean[0], y

    return collate


def own_generator():
    generator = torch.Generator().manual_seed(0)
    return columns(lambda x, y: (x + torch.randn(x.shape, generator=generator), y))


def own_stream():
    numbers = iter(torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist())
    return columns(lambda x, y: (x + next(numbers), y))


def tokenized(tokenizer, padding):
    def collate(records):
        batch = tokenizer(
            [text for text, _ in records], padding=padding, truncation=True, max_length=12, return_tensors="pt"
        )
        batch["labels"] = torch.tensor([y for _, y in records])
        return batch

    return collate


def popped(records):
    """Takes its records apart."""
    return torch.tensor([r.pop("x") for r in records]), torch.tensor([r.pop("y") for r in records])


GOOD = {
    "a stack": (lambda _: stacked, IMAGE),
    "named": (lambda _: lambda records: {"x": stacked(records)[0], "labels": stacked(records)[1]}, IMAGE),
    "arrays": (
        lambda _: lambda r: (torch.stack([torch.from_numpy(x) for x, _ in r]), torch.tensor([y for _, y in r])),
        (np.zeros((3, 4), np.float32), np.int64(1)),
    ),
    "each record standardised": (
        lambda _: columns(lambda x, y: ((x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True), y)),
        IMAGE,
    ),
    "noise, torch": (lambda _: columns(lambda x, y: (x + torch.randn_like(x), y)), IMAGE),
    "noise, numpy": (lambda _: columns(lambda x, y: (x + np.random.normal(), y)), IMAGE),
    "noise, Python": (lambda _: columns(lambda x, y: (x + random.random(), y)), IMAGE),
    "noise, a generator of its own": (lambda _: own_generator(), IMAGE),
    "padded to a public length": (lambda _: padded_to(400), SEQUENCE),
    "sorted by length": (lambda _: lambda r: padded_to(400)(sorted(r, key=lambda p: -len(p[0]))), SEQUENCE),
    "takes records apart": (lambda _: popped, {"x": 1.0, "y": 0}),
    "Hugging Face, max_length": (
        lambda tokenizer: DataCollatorWithPadding(tokenizer, padding="max_length", max_length=16),
        TOKENS,
    ),
    "Hugging Face, max_length, tensors": (
        lambda tokenizer: DataCollatorWithPadding(tokenizer, padding="max_length", max_length=16),
        {name: torch.tensor(value) for name, value in TOKENS.items()},
    ),
    "Hugging Face, tags, max_length": (
        lambda tokenizer: DataCollatorForTokenClassification(tokenizer, padding="max_length", max_length=16),
        {**TOKENS, "labels": [0, 1, 1, 0]},
    ),
    "Hugging Face, default": (lambda _: default_data_collator, TOKENS),
    "tokenizes, max_length": (lambda tokenizer: tokenized(tokenizer, "max_length"), ("a sun", 1)),
    "with strings": (lambda _: lambda r: (stacked([p[:2] for p in r]), [p[2] for p in r]), (*IMAGE, "name")),
}

PADS, MIXES = "another shape beside other records", "other values beside other records"
COUNTS, CARRIES = "does not give one row for each record", "other values when it comes again"
BAD = {
    "padded to the longest": (lambda _: padded, SEQUENCE, PADS),
    "padded to the longest, a multiple of eight": (lambda _: padded_to_eight, SEQUENCE, PADS),
    "padded in the last dimension": (
        lambda _: (
            lambda r: (
                torch.stack([pad(x, (0, max(p.shape[-1] for p, _ in r) - x.shape[-1])) for x, _ in r]),
                torch.tensor([y for _, y in r]),
            )
        ),
        IMAGE,
        PADS,
    ),
    "trimmed to the longest": (
        lambda _: trimmed,
        (torch.ones(9, dtype=torch.long), torch.ones(9, dtype=torch.long), 1),
        PADS,
    ),
    "classes of the batch": (lambda _: columns(lambda x, y: (x, one_hot(y))), IMAGE, PADS),
    "standardised by the batch": (lambda _: columns(lambda x, y: ((x - x.mean(0)) / x.std(0), y)), IMAGE, MIXES),
    "a thousandth of the mean": (lambda _: columns(lambda x, y: (x - 1e-3 * x.mean(0), y)), IMAGE, MIXES),
    "bytes if one is large": (lambda _: columns(lambda x, y: (x / 255 if x.max() > 1.5 else x, y)), IMAGE, MIXES),
    "zero unless all are finite": (
        lambda _: columns(lambda x, y: (x if x.isfinite().all() else 0 * x, y)),
        IMAGE,
        MIXES,
    ),
    "a hundredth of a spread": (
        lambda _: lambda r: (torch.stack([x for x, _ in r]) / (1 + 0.01 * (len(r) > 1)), torch.ones(len(r))),
        IMAGE,
        MIXES,
    ),
    "mixed at random": (lambda _: columns(mixed), IMAGE, MIXES),
    "one record for all": (lambda _: largest_only, IMAGE, MIXES),
    "targets of the batch": (lambda _: columns(lambda x, y: (x, y - y.float().mean())), IMAGE, MIXES),
    "the first three": (lambda _: lambda r: default_collate(r[:3]), IMAGE, COUNTS),
    "one too many": (lambda _: lambda r: default_collate([*r, r[0]]), IMAGE, COUNTS),
    "two rows a record": (lambda _: columns(lambda x, y: (x.repeat(2, 1, 1, 1), y.repeat(2))), IMAGE, COUNTS),
    "a list of tensors": (lambda _: lambda r: ([x for x, _ in r], torch.tensor([y for _, y in r])), IMAGE, COUNTS),
    "all but the first": (lambda _: lambda r: default_collate(r[1:]), IMAGE, "fails on a record alone"),
    "running mean": (lambda _: running_mean(), IMAGE, CARRIES),
    "its own stream of numbers": (lambda _: own_stream(), IMAGE, CARRIES),
    "Hugging Face, longest": (lambda tokenizer: DataCollatorWithPadding(tokenizer), TOKENS, PADS),
    "Hugging Face, longest, a multiple of 64": (
        lambda tokenizer: DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64),
        TOKENS,
        PADS,
    ),
    "Hugging Face, tags, longest": (
        lambda tokenizer: DataCollatorForTokenClassification(tokenizer),
        {**TOKENS, "labels": [0, 1, 1, 0]},
        PADS,
    ),
    "tokenizes, longest": (lambda tokenizer: tokenized(tokenizer, True), ("a sun", 1), PADS),
}


@pytest.mark.parametrize("name", GOOD)
def test_functions_of_single_records_are_accepted(name, tokenizer):
    make, record = GOOD[name]
    try_on_made_up_records(make(tokenizer), record, "loader")  # a warning would be an error


@pytest.mark.parametrize("name", BAD)
def test_functions_of_whole_batches_are_refused(name, tokenizer):
    make, record, reason = BAD[name]
    with pytest.raises(ValueError, match=reason) as raised:
        try_on_made_up_records(make(tokenizer), record, "public_loader")
    assert str(raised.value).startswith("public_loader's collate function ")


@pytest.mark.parametrize("name", [name for name, (_, _, reason) in BAD.items() if reason in (PADS, MIXES)])
def test_in_batches_of_one_there_is_nothing_to_mix(name, tokenizer):
    make, record, _ = BAD[name]
    try_on_made_up_records(make(tokenizer), record, "loader", several=False)


@pytest.mark.parametrize("name", [name for name, (_, _, reason) in BAD.items() if reason == CARRIES])
def test_in_batches_of_one_something_may_still_be_carried_on(name):
    make, record, reason = BAD[name]
    with pytest.raises(ValueError, match=reason):
        try_on_made_up_records(make(None), record, "loader", several=False)


REMEDIES = {
    "padded to the longest": "to one public length L, in place of pad_sequence by torch.nn.functional.pad",
    "standardised by the batch": "in the data set, with public constants",
    "running mean": "use torch's, numpy's or Python's generators, and public constants",
    "the first three": "drop or repeat none",
}


@pytest.mark.parametrize("name", REMEDIES)
def test_refusals_name_a_way_out(name):
    with pytest.raises(ValueError, match=re.escape(REMEDIES[name])):
        try_on_made_up_records(BAD[name][0](None), BAD[name][1], "loader")


@pytest.mark.parametrize("name", ["a stack", "noise, torch"])
def test_the_verdict_does_not_depend_on_values(name):
    """What a function is shown in a trial is the same for all records of one shape."""

    def shown(value):
        seen = []

        def collate(records):
            seen.extend(x.clone() for x, _ in records)
            return GOOD[name][0](None)(records)

        try_on_made_up_records(collate, (torch.full((3, 8, 8), value), 1), "loader")
        return seen

    for other in (1e30, float("nan")):
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(shown(0.0), shown(other), strict=True))


def test_trials_leave_the_global_generators_alone():
    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = state()
    for name in ("noise, torch", "noise, numpy", "noise, Python"):
        try_on_made_up_records(GOOD[name][0](None), IMAGE, "loader")
    assert state() == before


@pytest.mark.parametrize(
    ("collate", "record"),
    [
        (lambda r: (torch.stack([x for x, _ in r]), torch.tensor([{"cat": 0, "dog": 1}[y] for _, y in r])), "cat"),
        (lambda r: (torch.stack([x for x, _ in r]), torch.ones(len(r))), object()),
    ],
    ids=["values that are not known", "types that are not known"],
)
def test_a_function_that_cannot_be_tried_is_said_to_be_shown_single_records(collate, record):
    with pytest.warns(
        UserWarning, match="loader's collate function cannot be tried on made-up records; every record is"
    ):
        try_on_made_up_records(collate, (torch.zeros(2), record), "loader")


# --- one record at a time --------------------------------------------------------------------------------------------


class Seen:
    """A stack that remembers how many private records it was shown at a time; these are whole multiples of 1e9."""

    def __init__(self):
        self.private = []

    def __call__(self, records):
        if any(float(x.sum()) > 1e8 for x, _ in records):
            assert len(records) == 1, "shown two records at once"
            self.private.append(len(records))
        return stacked(records)


@pytest.mark.parametrize("stream", [False, True])
def test_a_collate_function_never_sees_two_private_records(stream):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    x, y = torch.arange(1.0, 11)[:, None] * 1e9, torch.arange(10.0)
    seen = Seen()
    loader = DataLoader(Stream() if stream else TensorDataset(x, y), batch_size=4, collate_fn=seen)
    pieces = list(loaders.each_alone(loader))
    assert seen.private == [1] * 10
    assert [len(b) for _, b in pieces] == [4, 4, 2]
    assert torch.equal(torch.cat([a for a, _ in pieces]), x)
    assert torch.equal(torch.cat([b for _, b in pieces]), y)


def moved(loader_with, loader_without, model=None, **options):
    """|G(D∪{z}) − G(D)| / C_g."""
    model = nn.Linear(3, 1).double() if model is None else model
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    gathered = [
        ExpMQuadEngine().gather(
            model, loader, None, criterion=nn.MSELoss(), max_grad_norm=BOUND, max_curvature=0.0, nominal_size=32, **options
        ).sums.gradient
        for loader in (loader_with, loader_without)
    ]  # fmt: skip
    return float((gathered[0] - gathered[1]).norm()) / BOUND


X, Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.ones(32, 1).double()
OUTLIER = torch.full((1, 3), 1e4, dtype=torch.float64)


def neighbours(dataset=TensorDataset, **options):
    with_it = dataset(torch.cat([X, OUTLIER]), torch.cat([Y, Y[:1]]))
    return [DataLoader(d, batch_size=64, **options) for d in (with_it, dataset(X, Y))]


class Pooled(nn.Module):
    """The mean over the places of a sequence, padding included."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(1, 1).double()

    def forward(self, x):
        return self.last(x.mean(1))


def test_padding_to_the_longest_moves_all_records_and_is_refused():
    """Without the check: 48.5 C_g."""
    short = [(torch.ones(3, 1).double() * (1 + i), Y[0]) for i in range(32)]
    long = (torch.ones(500, 1).double(), Y[0])
    loaders = [DataLoader(Listed(items), batch_size=64, collate_fn=padded) for items in ([*short, long], short)]
    with pytest.raises(ValueError, match="as padding to the longest of the batch does"):
        moved(*loaders, Pooled())
    fixed = [DataLoader(loader.dataset, batch_size=64, collate_fn=padded_to(512)) for loader in loaders]
    assert 0.5 < moved(*fixed, Pooled()) <= 1 + 1e-6


def test_standardising_by_the_batch_moves_all_records_and_is_refused():
    """Without the check: 22 C_g."""
    with pytest.raises(ValueError, match="as a mean over the batch does"):
        moved(*neighbours(collate_fn=columns(lambda x, y: ((x - x.mean(0)) / x.std(0), y))))


class Named(Fetched):
    """Records with something of which no other can be made."""

    __getitems__ = None

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "of": frozenset([index])}


@pytest.mark.filterwarnings("ignore:loader's collate function cannot be tried")
def test_what_cannot_be_tried_is_private_by_construction():
    """Records of a type of which no other can be made, divided by the largest of their batch. Seen at once: 6.9 C_g."""

    def collate(records):
        x = torch.stack([r["x"] for r in records])
        return x / x.abs().max(), torch.stack([r["y"] for r in records])

    for largest in (1, 64):
        assert moved(*neighbours(Named, collate_fn=collate), max_physical_batch_size=largest) <= 1 + 1e-6


def test_records_are_fetched_one_at_a_time():
    """Hugging Face's data sets, among others, fetch a whole batch at once, and transform it. Seen at once: 6.9 C_g."""
    assert 0.9 < moved(*neighbours(Fetched)) <= 1 + 1e-6
    fetched = torch.cat([x for x, _ in loaders.each_alone(neighbours(Fetched)[1])])
    torch.testing.assert_close(fetched, X / X.abs().amax(1, keepdim=True))


def test_batches_of_a_data_set_that_are_no_lists_are_refused():
    class Whole(Fetched):
        def __getitems__(self, indices):
            return self.x[indices], self.y[indices]

    with pytest.raises(ValueError, match=r"Whole\.__getitems__ must give a list with one record for each index"):
        next(iter(loaders.each_alone(neighbours(Whole, collate_fn=lambda batch: batch)[0])))


def test_workers_collate_alone():
    """The function fails in the worker if it is shown two private records."""
    x = torch.arange(1.0, 11)[:, None] * 1e9
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(TensorDataset(x, x[:, 0]), batch_size=10, collate_fn=Seen(), **options)
    (batch,) = loaders.each_alone(loader)
    assert torch.equal(batch[0], x)


def test_records_in_batches_of_one_may_have_any_length():
    """Each has its own shape, whatever the others have."""
    items = Listed([(torch.ones(n, 1).double(), Y[0]) for n in (3, 9, 5)])
    loader = DataLoader(items, batch_size=1, collate_fn=padded)
    assert [x.shape[1] for x, _ in loaders.each_alone(loader)] == [3, 9, 5]


def test_a_record_on_which_the_function_fails():
    def without_five(records):
        return default_collate([r for r in records if float(r[0]) != 5.0])

    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, collate_fn=without_five)
    with pytest.raises(ValueError, match="loader's collate function fails on a record alone: it must make one row"):
        list(loaders.each_alone(loader))


def test_memory_that_runs_out_is_not_a_failure_of_the_function():
    def collate(records):
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        Alone(collate, "loader", several=True)([IMAGE])
    with pytest.raises(MemoryError):
        Alone(collate, "loader", several=False)([IMAGE])


# --- putting together ------------------------------------------------------------------------------------------------


def test_rows_are_put_together_as_the_function_gave_them():
    class Encoding(UserDict):
        """As Hugging Face's."""

    x, y = torch.tensor([[1.0]]), torch.tensor([2])
    rows = [
        {"pair": Pair(x, y), "list": [x], "names": ["a"], "words": ("b",), "flag": True, "none": None},
        {"pair": Pair(3 * x, y), "list": [5 * x], "names": ["c"], "words": ("d",), "flag": True, "none": None},
    ]
    found = joined([Encoding(row) for row in rows], "loader")
    assert type(found) is Encoding
    assert type(found["pair"]) is Pair
    assert torch.equal(found["pair"].x, torch.tensor([[1.0], [3.0]]))
    assert torch.equal(found["pair"].y, torch.tensor([2, 2]))
    assert torch.equal(found["list"][0], torch.tensor([[1.0], [5.0]]))
    assert found["names"] == ["a", "c"]
    assert found["words"] == ("b", "d")
    assert found["flag"] is True
    assert found["none"] is None


ROWS = {
    "shapes": ([torch.zeros(1, 3), torch.zeros(1, 4)], "records of different shapes"),
    "types of numbers": ([torch.zeros(1), torch.zeros(1, dtype=torch.float64)], "records of different types"),
    "types": ([torch.zeros(1), [0.0]], "records of different types"),
    "fields": ([{"x": torch.zeros(1)}, {"y": torch.zeros(1)}], "records of different fields"),
    "lengths": ([[torch.zeros(1)], [torch.zeros(1)] * 2], "records of different lengths"),
    "two rows": ([torch.zeros(2, 3), torch.zeros(2, 3)], "does not give one row for each record"),
    "no row": ([torch.zeros(0, 3), torch.zeros(0, 3)], "does not give one row for each record"),
    "no dimension": ([torch.tensor(0.0), torch.tensor(0.0)], "does not give one row for each record"),
    "a number": ([171717, 282828], "gives a int that is not the same for all records"),
    "an array": ([np.zeros(1), np.zeros(1)], "gives a ndarray, of which it is not known what belongs to which record"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_batch(name):
    rows, reason = ROWS[name]
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        joined(rows, "loader")
    assert not re.search(r"\d", str(raised.value))


SAMPLES = {
    "tensors": [(torch.ones(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(0))],
    "numbers": [(1.5, 2, True), (2.5, 3, False)],
    "arrays": [(np.ones(2, np.float32), np.int64(3)), (np.zeros(2, np.float32), np.int64(4))],
    "named": [{"x": torch.ones(1), "name": "a"}, {"x": torch.zeros(1), "name": "b"}],
    "named tuples": [Pair(torch.ones(1), 1), Pair(torch.zeros(1), 2)],
    "lists": [[torch.ones(1), [1, 2]], [torch.zeros(1), [3, 4]]],
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stack_is_what_single_records_put_together_are(name):
    """So torch's own function may see a batch at once."""
    samples = SAMPLES[name]
    assert alike(samples)
    assert same(default_collate(samples), joined([default_collate([s]) for s in samples], "loader"))
    assert same(Alone(default_collate, "loader", several=True)(samples), default_collate(samples))


UNLIKE = {
    "shapes": [torch.ones(2), torch.ones(3)],
    "types of numbers": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "an integer among floats": [1, 0.5],
    "a missing field": [{"x": 1, "y": 2}, {"x": 1}],
    "lengths": [[1, 2], [1]],
    "array types": [np.ones(2), np.ones(2, np.float32)],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_records_that_differ_are_not_stacked(name):
    """``default_collate`` would change the type of one record's row by another's, or quote a private length."""
    assert not alike(UNLIKE[name])
    with pytest.raises(ValueError, match="loader gives records of different") as raised:
        Alone(default_collate, "loader", several=True)(UNLIKE[name])
    assert not re.search(r"\d", str(raised.value))


def test_types_that_torch_lets_others_collate_are_collated_alone(monkeypatch):
    """``default_collate`` can be extended by functions that see a whole batch."""

    class Scaled:
        def __init__(self, value):
            self.value = value

    def whole(batch, *, collate_fn_map=None):
        values = torch.tensor([s.value for s in batch])
        return values / values.max()

    monkeypatch.setitem(torch.utils.data._utils.collate.default_collate_fn_map, Scaled, whole)
    found = Alone(default_collate, "loader", several=True)([Scaled(1.0), Scaled(4.0)])
    assert found.tolist() == [1.0, 1.0]
