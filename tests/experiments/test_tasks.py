"""Tasks: what is public, what is private, how a model is judged; on small files, and once on the published ones."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from test_datasets import APACHE, PATIENT, REAL_DATA, csv_text, write_eicu, write_mnist, write_physionet
from test_downloads import put
from torch import nn
from torch.utils.data import TensorDataset

from opacus_expm import tasks
from opacus_expm.experiments import digits, synthetic
from opacus_expm.experiments import task as task_module

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So little data gains nothing from more, and loses much where the processor is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


real_data = pytest.mark.skipif(
    not (REAL_DATA / "mnist").is_dir(),
    reason="needs the published files: set OPACUS_EXPM_DATA to a directory with mnist/, eicu_demo/, physionet2012/",
)


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- scores ----------------------------------------------------------------------------------------------------------


def task(x, y, criterion, metric="accuracy"):
    data = TensorDataset(x, y)
    return tasks.Task(nn.Identity(), data, data, data, criterion, name="small", metric=metric)


def test_accuracy_of_classes_of_one_hot_targets_and_of_one_output():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2500, 3, generator=generator)  # more than one batch
    classes = torch.randint(3, (2500,), generator=generator)
    expected = 100 * (x.argmax(1) == classes).double().mean().item()
    one_hot = nn.functional.one_hot(classes, 3).float()
    assert task(x, classes, nn.CrossEntropyLoss()).score(nn.Identity()) == pytest.approx(expected)
    assert task(x, one_hot, nn.MSELoss()).score(nn.Identity()) == pytest.approx(expected)

    single = task(torch.tensor([[2.0], [-0.1], [0.1], [-3.0]]), torch.tensor([[1.0], [0], [0], [1]]), nn.MSELoss())
    assert single.score(nn.Identity()) == 50.0
    assert single.score(nn.Threshold(0.5, -1.0)) == 75.0


def test_loss_is_the_criterion_on_all_records_at_once():
    """Also where the mean of the batches' means is another number: 2,500 records in batches of 1,000, weighted classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2500, 2, generator=generator) * torch.linspace(0, 3, 2500)[:, None]
    y = torch.randint(2, (2500,), generator=generator)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0]))
    found = task(x, y, criterion, "loss").score(nn.Identity())
    assert found == pytest.approx(criterion(x, y).item())
    batches = [criterion(a, b).item() for a, b in zip(x.split(1000), y.split(1000), strict=True)]
    assert found != pytest.approx(np.mean(batches), rel=1e-3)


def test_models_are_judged_in_evaluation_mode_and_left_as_they_were():
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), len(x)))
            return x

    model = nn.Sequential(nn.Dropout(0.9), Watch(), nn.BatchNorm1d(1))
    model[2].eval()  # a frozen layer stays frozen
    x = torch.ones(600, 1)
    small = task(x, x, nn.MSELoss(), "loss")
    assert small.score(model) == pytest.approx(0, abs=1e-6)
    assert seen == [(False, False, n) for n in (1, 250, 250, 100)]  # a synthetic record first, for the threads
    assert [module.training for module in model] == [True, True, False]
    assert model.training


def test_sine_is_judged_by_its_loss(monkeypatch):
    monkeypatch.setattr(synthetic, "fit", lambda model, *rest, **options: None)
    for place in (synthetic, task_module):  # where pretraining and the score look for it
        monkeypatch.setattr(place, "loss", lambda *rest: 0.0)
    found = tasks.sine(records=10)
    assert (found.name, found.metric, found.score(found.model)) == ("sine", "loss", 0.0)


# --- MNIST -----------------------------------------------------------------------------------------------------------


def pixels(dataset):
    return dataset.tensors[0] * 0.3081 + 0.1307


def test_mnist_public_and_private_images_are_different_ones_and_only_the_private_are_noisy(tmp_path):
    images, labels = write_mnist(tmp_path)
    found = tasks.mnist(data_dir=tmp_path, records=30)
    clean = torch.tensor(images).flatten(1) / 255
    public, private = pixels(found.public).flatten(1), pixels(found.private).flatten(1)
    chosen_public, chosen_private = (torch.cdist(x, clean).argmin(1) for x in (public, private))
    assert sorted([*chosen_public.tolist(), *chosen_private.tolist()]) == list(range(60))
    assert chosen_public.tolist() != sorted(chosen_public.tolist())
    torch.testing.assert_close(public, clean[chosen_public])
    for dataset, chosen in ((found.public, chosen_public), (found.private, chosen_private)):
        assert torch.equal(dataset.tensors[1], torch.tensor(labels)[chosen].long())
        assert dataset.tensors[0].shape == (30, 1, 28, 28)

    noise = (private - clean[chosen_private]).flatten().numpy()
    assert stats.kstest(noise, stats.norm(0, 0.5).cdf).pvalue > 1e-3
    assert stats.kstest(noise, stats.norm(0, 0.48).cdf).pvalue < 1e-3  # the control must fail
    assert private.min() < -0.5  # noise is not cut off
    assert private.max() > 1.5
    assert found.test.tensors[0].shape == (30, 1, 28, 28)
    assert 0.4 < pixels(found.test).std() < 0.8
    assert sum(parameter.numel() for parameter in found.model.parameters()) == 6722
    assert (found.name, found.metric) == ("mnist", "accuracy")


def test_mnist_depends_on_its_seed_alone(tmp_path):
    write_mnist(tmp_path)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tasks.mnist(3, data_dir=tmp_path, records=20)
    assert torch.equal(torch.get_rng_state(), state)
    for path in (tmp_path / "cache").rglob("*.pt"):
        path.unlink()
    torch.manual_seed(2)
    again, other = (tasks.mnist(seed, data_dir=tmp_path, records=20) for seed in (3, 4))
    for name in ("public", "private", "test"):
        assert same(getattr(first, name), getattr(again, name))
        assert not same(getattr(first, name), getattr(other, name))
    assert torch.equal(weights(first.model), weights(again.model))
    assert not torch.equal(weights(first.model), weights(other.model))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_mnist_pretraining_sees_public_records_only_and_learns(tmp_path, loss):
    write_mnist(tmp_path, train=120)
    found = tasks.mnist(data_dir=tmp_path, records=40, loss=loss)
    torch.manual_seed(0)
    untrained = tasks.cnn()
    before, after = (tasks.loss(model, found.public, found.criterion) for model in (untrained, found.model))
    assert after < before
    # Nothing else can have been seen: other private and test images lead to the same weights.
    generator = np.random.default_rng(1)
    for path in (tmp_path / "cache").rglob("*.pt"):
        path.unlink()
    images = [image.tobytes() for image in (pixels(found.public) * 255).round().byte().numpy()[:, 0]]
    real_mnist = tasks.datasets.mnist

    def altered(data_dir):
        train, train_labels, test, test_labels = real_mnist(data_dir)
        train = train.copy()
        for image in train:
            if image.tobytes() not in images:
                image[:] = generator.integers(0, 255, image.shape)
        return train, train_labels, generator.permutation(test), test_labels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.datasets, "mnist", altered)
        twin = tasks.mnist(data_dir=tmp_path, records=40, loss=loss)
    assert same(twin.public, found.public)
    assert not same(twin.private, found.private)
    assert torch.equal(weights(twin.model), weights(found.model))


def test_mnist_targets_of_the_squared_error_are_one_hot(tmp_path):
    write_mnist(tmp_path)
    classes, one_hot = (tasks.mnist(data_dir=tmp_path, records=20, loss=loss) for loss in ("cross_entropy", "mse"))
    assert isinstance(one_hot.criterion, nn.MSELoss)
    assert torch.equal(one_hot.private.tensors[1].argmax(1), classes.private.tensors[1])
    assert torch.equal(one_hot.private.tensors[1].sum(1), torch.ones(20))
    assert one_hot.metric == "accuracy"


def test_weights_are_kept_and_damaged_ones_computed_again(tmp_path, cache, monkeypatch):
    write_mnist(tmp_path)
    first = tasks.mnist(data_dir=tmp_path, records=20)
    [kept] = cache.rglob("*.pt")
    with monkeypatch.context() as patch:
        patch.delattr(digits, "fit")  # not to be trained again
        again = tasks.mnist(data_dir=tmp_path, records=20)
        assert torch.equal(weights(again.model), weights(first.model))
        for other in ({"records": 21}, {"seed": 1}, {"loss": "mse"}):
            with pytest.raises(NameError):
                tasks.mnist(**({"data_dir": tmp_path, "records": 20} | other))
        write_mnist(tmp_path, seed=1)  # other images under the same name
        with pytest.raises(NameError):
            tasks.mnist(data_dir=tmp_path, records=20)

    write_mnist(tmp_path)
    content = kept.read_bytes()
    damages = [b"", b"no weights", content[: len(content) // 2]]
    for other in ({**first.model.state_dict(), "7.weight": torch.zeros(2, 2)}, first.model):  # a pickle is not run
        torch.save(other, tmp_path / "other.pt")
        damages.append((tmp_path / "other.pt").read_bytes())
    for damage in damages:
        kept.write_bytes(damage)
        assert torch.equal(weights(tasks.mnist(data_dir=tmp_path, records=20).model), weights(first.model))
        assert torch.load(kept, weights_only=True).keys() == first.model.state_dict().keys()
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [kept.name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": 31}, "records must be at most half of the 60 training images, got 31"),
        ({"records": 0}, "records must be a positive integer, got 0"),
        ({"seed": -1}, "seed must be a non-negative integer"),
        ({"loss": "hinge"}, "loss must be one of 'cross_entropy', 'mse', got 'hinge'"),
    ],
)
def test_mnist_arguments_are_checked(tmp_path, options, message):
    write_mnist(tmp_path)
    with pytest.raises(ValueError, match=message):
        tasks.mnist(**({"data_dir": tmp_path, "records": 20} | options))


@real_data
def test_mnist_on_the_published_images():
    found = tasks.mnist(data_dir=REAL_DATA, records=600)
    assert [len(dataset) for dataset in (found.public, found.private, found.test)] == [600, 600, 10_000]
    assert abs(found.public.tensors[0].mean()) < 0.02
    assert abs(found.public.tensors[0].std() - 1) < 0.02
    assert tasks.accuracy(found.model, found.public) > 85
    assert 30 < found.score(found.model) < 85  # the noise is a shift


def test_far_digits_are_those_of_mnist_mirrored_or_not_paler_and_noisy(tmp_path, monkeypatch):
    images, labels = write_mnist(tmp_path, train=400, test=10)
    near = tasks.mnist(data_dir=tmp_path, records=200)
    monkeypatch.delattr(digits, "fit")  # the model is that of the near task
    found = tasks.mnist_far(data_dir=tmp_path, records=200)
    assert same(found.public, near.public)
    assert torch.equal(weights(found.model), weights(near.model))
    assert torch.equal(found.private.tensors[1], near.private.tensors[1])
    assert (found.name, found.metric) == ("mnist_far", "accuracy")

    clean = torch.tensor(images) / 255
    private = pixels(found.private)[:, 0]
    both = torch.stack([clean, clean.flip(-1)]) / 2
    distances = torch.cdist(private.flatten(1), both.flatten(0, 1).flatten(1))
    mirrored, chosen = distances.argmin(1) // 400, distances.argmin(1) % 400
    assert torch.equal(found.private.tensors[1], torch.tensor(labels)[chosen].long())
    assert stats.binomtest(int(mirrored.sum()), 200, 0.5).pvalue > 1e-3
    noise = (private - both[mirrored, chosen]).flatten().numpy()
    assert stats.kstest(noise, stats.norm(0, 0.25).cdf).pvalue > 1e-3
    assert stats.kstest(noise, stats.norm(0, 0.24).cdf).pvalue < 1e-3  # the control must fail
    assert 0.2 < pixels(found.test).std() < 0.4

    assert same(tasks.mnist_far(data_dir=tmp_path, records=200).private, found.private)
    with pytest.raises(ValueError, match="records must be at most half of the 400 training images, got 201"):
        tasks.mnist_far(data_dir=tmp_path, records=201)


@real_data
def test_far_digits_on_the_published_images():
    found = tasks.mnist_far(data_dir=REAL_DATA, records=600)
    assert tasks.accuracy(found.model, found.public) > 85
    assert 30 < found.score(found.model) < 60  # farther than the noise alone


# --- intensive care --------------------------------------------------------------------------------------------------

COLUMNS = tasks.datasets.VARIABLES


def write_icu(directory, *, private_age=70, seed=0):
    """40 stays in the eICU demo and in each PhysioNet set, a quarter of them deaths, with a higher heart rate."""
    generator = np.random.default_rng(seed)
    rates = [60 + 40 * (number % 4 == 0) + generator.integers(0, 30) for number in range(40)]
    patients = [
        PATIENT
        | {"patientunitstayid": number, "age": 30 + number, "gender": ("Male", "Female")[number % 2]}
        | {"hospitaldischargestatus": "Alive" if number % 4 else "Expired"}
        for number in range(40)
    ]
    scores = []
    for number in range(40):
        row = {name: value if name in ("eyes", "motor") else 1.1 * value for name, value in APACHE.items()}
        row = row if number % 3 else dict(APACHE)
        changed = {
            "patientunitstayid": number,
            "heartrate": rates[number],
            "verbal": 1 + number % 5,
            "vent": number % 2,
        }
        scores.append(
            row | changed | {"temperature": 36 + number % 3, "ph": 7.2 + 0.1 * (number % 4), "fio2": 40 + number}
        )
    write_eicu(directory, patients, scores)
    for start, letter in enumerate("abc"):
        numbers = [1000 * start + number for number in range(40)]
        stays = {
            number: (
                f"Age,{private_age + number % 10}",
                f"HR,{90 + 30 * (number % 4 == 0) + number % 7}",
                "Creatinine,29",
            )
            for number in numbers
        }
        write_physionet(directory, letter, stays, deaths=[number for number in numbers if number % 4 == 0])


def test_icu_takes_mean_and_deviation_from_public_stays(tmp_path):
    write_icu(tmp_path)
    found = tasks.icu(data_dir=tmp_path, balanced=False)
    assert [len(dataset) for dataset in (found.public, found.private, found.test)] == [40, 80, 40]
    assert (found.name, found.metric) == ("icu", "loss")
    x, y = found.public.tensors
    assert x.shape == (40, 21)
    assert y.shape == (40, 1)
    torch.testing.assert_close(x.mean(0), torch.zeros(21), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(21), atol=1e-4, rtol=0)
    assert y.sum() == 10

    table = tasks.datasets.eicu_demo(tmp_path)
    private = found.private.tensors[0]
    age = table.features[:, 0]
    expected = (70 + np.tile(np.arange(40) % 10, 2) - age.mean()) / age.std()
    assert private[:, 0].numpy() == pytest.approx(expected, abs=1e-5)
    assert (private[:, COLUMNS.index("creatinine")] == 5).all()  # cut off
    assert (private[:, COLUMNS.index("sodium")] == 0).all()  # missing

    write_icu(tmp_path, private_age=20)
    other = tasks.icu(data_dir=tmp_path, balanced=False)
    assert same(other.public, found.public)
    assert not same(other.private, found.private)
    assert torch.equal(weights(other.model), weights(found.model))


def test_icu_balanced_sets_keep_all_deaths_and_as_many_survivors(tmp_path):
    write_icu(tmp_path)
    everyone = tasks.icu(data_dir=tmp_path, balanced=False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found, again, other = (tasks.icu(seed, data_dir=tmp_path) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert found.metric == "accuracy"
    for name, deaths in (("public", 10), ("private", 20), ("test", 10)):
        x, y = getattr(found, name).tensors
        all_x, all_y = getattr(everyone, name).tensors
        assert (y.sum(), len(y)) == (deaths, 2 * deaths)
        assert torch.equal(x[y[:, 0] == 1], all_x[all_y[:, 0] == 1])
        rows = {tuple(row) for row in x[y[:, 0] == 0].tolist()}
        assert rows <= {tuple(row) for row in all_x[all_y[:, 0] == 0].tolist()}
        assert same(getattr(found, name), getattr(again, name))
        assert not same(getattr(found, name), getattr(other, name))
    assert torch.equal(weights(found.model), weights(again.model))
    assert tasks.accuracy(found.model, found.public) > 80


def test_icu_pretraining_finds_the_penalised_optimum(tmp_path):
    """Against Newton's method on the same loss, weight decay 0.1 on weights and bias."""
    write_icu(tmp_path)
    found = tasks.icu(data_dir=tmp_path)
    x, y = (tensor.double() for tensor in found.public.tensors)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    solution = torch.zeros(22, dtype=torch.float64)
    for _ in range(20):
        p = torch.sigmoid(x @ solution)
        gradient = x.T @ (p - y[:, 0]) / len(x) + 0.1 * solution
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + 0.1 * torch.eye(22)
        solution -= torch.linalg.solve(hessian, gradient)
    torch.testing.assert_close(weights(found.model).double(), solution, atol=1e-3, rtol=0)


def test_icu_with_the_papers_loss_has_signs_for_targets_and_the_ridge_solution(tmp_path):
    write_icu(tmp_path)
    found, logistic = tasks.icu(data_dir=tmp_path, loss="mse"), tasks.icu(data_dir=tmp_path)
    for name in ("public", "private", "test"):
        (x, y), (same_x, labels) = getattr(found, name).tensors, getattr(logistic, name).tensors
        assert torch.equal(x, same_x)
        assert torch.equal(y, 2 * labels - 1)
    x, y = (tensor.double() for tensor in found.public.tensors)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    solution = torch.linalg.solve(2 * x.T @ x / len(x) + 0.1 * torch.eye(22), 2 * x.T @ y[:, 0] / len(x))
    torch.testing.assert_close(weights(found.model).double(), solution, atol=1e-3, rtol=0)
    right = (x @ solution > 0) == (y[:, 0] > 0)
    assert tasks.accuracy(found.model, found.public) == pytest.approx(100 * float(right.double().mean()))
    with pytest.raises(ValueError, match="loss must be one of"):
        tasks.icu(data_dir=tmp_path, loss="hinge")


@real_data
def test_icu_on_the_published_stays():
    found = tasks.icu(data_dir=REAL_DATA)
    assert [len(dataset) for dataset in (found.public, found.private, found.test)] == [392, 2278, 1136]
    for dataset in (found.public, found.private, found.test):
        x, y = dataset.tensors
        assert y.mean() == 0.5
        assert x.abs().max() <= 5
    tuned = copy.deepcopy(found.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tasks.fit(tuned, found.private, found.criterion, epochs=20, batch_size=256, learning_rate=1e-2)
    before, after = found.score(found.model), found.score(tuned)
    assert 60 < before < 72
    assert 73 < after < 80


# --- tables of one's own ---------------------------------------------------------------------------------------------


def write_csv(directory, *, private_age=60):
    """Three files with twelve stays each, a third of them deaths; the third has its columns in another order."""
    paths = []
    for name, age in (("public", 50), ("private", private_age), ("test", private_age)):
        rows = [
            {"mortality": int(number % 3 == 0), "age": age + number, "lactate": "" if number % 5 else 1 + number % 2}
            for number in range(12)
        ]
        if name == "test":
            rows = [dict(reversed(row.items())) for row in rows]
        paths.append(put(directory / f"{name}.csv", csv_text(rows)))
    return paths


def test_icu_from_csv(tmp_path, cache):
    found = tasks.icu_from_csv(*write_csv(tmp_path), balanced=False)
    assert (found.name, found.metric) == ("icu_from_csv", "loss")
    assert found.model.weight.shape == (1, 2)
    deviation = np.arange(12).std()
    for dataset, shift in ((found.public, 0), (found.private, 10), (found.test, 10)):
        x, y = dataset.tensors
        assert x[:, 0].numpy() == pytest.approx((np.arange(12) - 5.5 + shift) / deviation, rel=1e-5)
        assert torch.equal(x[:, 1] == 0, torch.arange(12) % 5 != 0)  # missing
        assert torch.equal(y[:, 0], (torch.arange(12) % 3 == 0).float())
    assert not cache.exists()  # nothing of private files is kept

    balanced = tasks.icu_from_csv(*write_csv(tmp_path))
    assert balanced.metric == "accuracy"
    assert [len(dataset) for dataset in (balanced.public, balanced.private, balanced.test)] == [8, 8, 8]


def test_icu_from_csv_names_what_is_wrong(tmp_path):
    public, private, test = write_csv(tmp_path)
    test.write_bytes(test.read_bytes().replace(b"lactate", b"lactates"))
    with pytest.raises(ValueError, match=r"test.csv lacks column 'lactate': the files of a task must have the same"):
        tasks.icu_from_csv(public, private, test)
    public, private, test = write_csv(tmp_path)
    private.write_bytes(private.read_bytes().replace(b",64,", b",sixty-four,"))
    with pytest.raises(ValueError, match=r"private.csv, line 6, column 'age' must be a number, .*got 'sixty-four'"):
        tasks.icu_from_csv(public, private, test)


@pytest.mark.parametrize(
    ("rows", "balanced", "message"),
    [
        (["0,50", "1,50"], False, "column 'age' of the public set must have two different values or more"),
        (["0,", "1,"], False, "column 'age' of the public set must have two different values or more"),
        (["0,50", "0,60"], True, "the public set must have at least one death and no fewer survivors .* got 0 deaths"),
        (["1,50", "0,60", "1,70"], True, "got 2 deaths and 1 survivors; pass balanced=False"),
    ],
)
def test_sets_that_cannot_be_used(tmp_path, rows, balanced, message):
    path = put(tmp_path / "stays.csv", "\n".join(["mortality,age", *rows]).encode())
    with pytest.raises(ValueError, match=message):
        tasks.icu_from_csv(path, path, path, balanced=balanced)
