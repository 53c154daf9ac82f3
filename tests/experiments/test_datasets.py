"""The readers of data sets, on small files made here and on the published ones where they are."""

import gzip
import hashlib
import io
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from test_downloads import put

from opacus_expm.experiments import datasets, downloads
from opacus_expm.experiments.datasets import VARIABLES

REAL_DATA = Path(os.environ.get("OPACUS_EXPM_DATA") or Path(__file__).parents[3] / "shared" / "data")


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def real_data():
    """Directory of the published files."""
    if not (REAL_DATA / "mnist").is_dir():
        pytest.skip("needs the published files: set OPACUS_EXPM_DATA to a directory with mnist/, eicu_demo/, ...")
    return REAL_DATA


def test_published_files_have_the_digests_that_are_checked(real_data):
    """Not the archives: their digests are of the packed files, and packing can differ."""
    listed = [*datasets.MNIST, *datasets.EICU_DEMO, *(outcomes for _, outcomes in datasets.PHYSIONET2012.values())]
    for file in listed:
        assert hashlib.sha256(downloads.read(downloads.find(file, real_data))).hexdigest() == file.sha256, file.name


# --- text messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("compress", [False, True])
def test_text_messages(tmp_path, ending, compress):
    text = ending.join(["ham\tOk lar...\twith a tab", "spam\tWIN £100\x85now!", "ham\t", ""]).encode()
    name = "SMSSpamCollection.gz" if compress else "SMSSpamCollection"
    put(tmp_path / "sms_spam" / name, gzip.compress(text, mtime=0) if compress else text)
    texts, spam = datasets.sms_spam(tmp_path)
    assert texts == ["Ok lar...\twith a tab", "WIN £100\x85now!", ""]
    assert spam.dtype == bool
    assert spam.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ham\tfine\neggs\tno\n", r"SMSSpamCollection, line 2 must be 'ham' or 'spam', a tab and a message"),
        ("ham fine\n", r"SMSSpamCollection, line 1 must be 'ham' or 'spam', a tab and a message"),
        ("\n", "SMSSpamCollection must hold messages, got none"),
        ("ham\t£\n", "SMSSpamCollection must be text in UTF-8"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message):
    put(tmp_path / "sms_spam/SMSSpamCollection", text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        datasets.sms_spam(tmp_path)


def test_the_published_messages(real_data):
    texts, spam = datasets.sms_spam(real_data)
    assert (len(texts), spam.sum()) == (5574, 747)
    content = downloads.read(downloads.find(datasets.SMS_SPAM, real_data)).replace(b"\r\n", b"\n")
    assert hashlib.sha256(content).hexdigest() == datasets.SMS_SPAM.sha256


# --- MNIST -----------------------------------------------------------------------------------------------------------


def idx(array):
    """An array as an IDX file."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def write_mnist(directory, train=60, test=30, seed=0):
    """Random images whose brightest quarter tells the label; returns training images and labels."""
    generator = np.random.default_rng(seed)
    for name, count in (("t10k", test), ("train", train)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = generator.integers(0, 100, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 9] += 150
        put(directory / f"mnist/{name}-images-idx3-ubyte.gz", gzip.compress(idx(images)))
        put(directory / f"mnist/{name}-labels-idx1-ubyte", idx(labels))
    return images, labels


@given(arrays.arrays(np.uint8, arrays.array_shapes(max_dims=4, min_side=0, max_side=4)), st.booleans())
def test_idx_round_trip(tmp_path_factory, array, compress):
    content = idx(array)
    path = put(tmp_path_factory.mktemp("idx") / "file", gzip.compress(content, mtime=0) if compress else content)
    found = datasets.idx(path)
    assert found.dtype == np.uint8
    assert np.array_equal(found, array)
    for wrong in (content + b"\0", content[:-1]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="file must"):
            datasets.idx(path)


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\x0d\1\0\0\0\0", b"<html>"])
def test_other_files_are_no_idx(tmp_path, content):
    with pytest.raises(ValueError, match=r"file must be an IDX file of bytes, which starts with 00 00 08, got"):
        datasets.idx(put(tmp_path / "file", content))


def test_mnist_needs_a_label_for_each_image(tmp_path):
    images, labels = write_mnist(tmp_path)
    found = datasets.mnist(tmp_path)
    assert [array.shape for array in found] == [(60, 28, 28), (60,), (30, 28, 28), (30,)]
    assert np.array_equal(found[0], images)
    assert np.array_equal(found[1], labels)
    put(tmp_path / "mnist/t10k-labels-idx1-ubyte", idx(labels))
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz must hold images of 28 × 28 with one label each"):
        datasets.mnist(tmp_path)


# --- CIFAR-10 --------------------------------------------------------------------------------------------------------


def pictures(count=7, seed=0):
    """Coarse random pictures, which JPEG hardly changes, and their labels."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(8, axis=1).repeat(8, axis=2), np.arange(count, dtype=np.uint8) % 10


def jpeg(image):
    buffer = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(image).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def write_npz(path, files, labels, changed=None):
    """Many JPEG files as one archive."""
    offsets = np.cumsum([0, *map(len, files)])
    arrays = {"jpeg": np.frombuffer(b"".join(files), dtype=np.uint8), "offsets": offsets, "labels": labels}
    arrays |= changed or {}
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in arrays.items() if array is not None})
    return put(path, buffer.getvalue())


def write_cifar10(directory, train=7, test=3):
    """Both parts as JPEG; returns the training pictures and labels before compression."""
    for part, count in (("test", test), ("train", train)):
        images, labels = pictures(count, seed=count)
        write_npz(directory / f"cifar10/{part}.npz", [jpeg(image) for image in images], labels)
    return images, labels


def write_binary(directory, batches):
    """CIFAR-10's own archive, from pictures and labels by the names of their files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, (images, labels) in batches.items():
            rows = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(len(images), -1)], axis=1)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = rows.size
            archive.addfile(member, io.BytesIO(rows.tobytes()))
    return put(directory / "cifar10/cifar-10-binary.tar.gz", buffer.getvalue())


def test_pictures_as_jpeg(tmp_path):
    images, labels = write_cifar10(tmp_path)
    found = datasets.cifar10("train", tmp_path)
    assert found.images.dtype == found.labels.dtype == np.uint8
    assert found.labels.tolist() == labels.tolist()
    assert found.images.shape == images.shape
    assert abs(found.images.astype(int) - images).mean() < 5
    assert abs(found.images[::-1].astype(int) - images).mean() > 20  # in this order and no other
    few = datasets.cifar10("train", tmp_path, first=2)
    assert np.array_equal(few.images, found.images[:2])
    assert few.labels.tolist() == labels[:2].tolist()
    assert len(datasets.cifar10("train", tmp_path, first=100).labels) == 7
    assert len(datasets.cifar10("test", tmp_path).labels) == 3


def test_pictures_as_published(tmp_path):
    parts = {f"data_batch_{number}": pictures(4, seed=number) for number in range(1, 6)}
    write_binary(tmp_path, {"test_batch": pictures(2, seed=9), **dict(reversed(parts.items()))})
    found = datasets.cifar10("train", tmp_path)
    assert np.array_equal(found.images, np.concatenate([images for images, _ in parts.values()]))
    assert np.array_equal(found.labels, np.concatenate([labels for _, labels in parts.values()]))
    assert np.array_equal(datasets.cifar10("train", tmp_path, first=5).images, found.images[:5])
    assert np.array_equal(datasets.cifar10("test", tmp_path).images, pictures(2, seed=9)[0])


def test_published_pictures_that_are_damaged(tmp_path):
    path = write_binary(tmp_path, {"test_batch": pictures(2)})
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz is no sound tar file of CIFAR-10's binary version"):
        datasets.cifar10("train", tmp_path)
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz must have labels from 0 to 9, got 11"):
        datasets.cifar10("test", write_binary(tmp_path, {"test_batch": (pictures(1)[0], np.array([11]))}).parents[1])
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz is no sound tar file"):
        datasets.cifar10("test", tmp_path)
    write_binary(tmp_path, {"test_batch": (np.zeros((2, 32, 16, 3), np.uint8), np.zeros(2, np.uint8))})
    with pytest.raises(ValueError, match=r"must hold records of 3,073 bytes, got 3074 bytes"):
        datasets.cifar10("test", tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": None}, r"test.npz must be an archive of numpy with 'jpeg', 'offsets' and 'labels'"),
        (
            {"labels": np.array([1, 2])},
            r"test.npz must have one offset more than labels, got \(4,\) offsets and \(2,\)",
        ),
        ({"labels": np.array([1, 2, 10])}, "test.npz must have labels from 0 to 9, got 10"),
        ({"labels": np.array([1, -1, 1])}, "test.npz must have labels from 0 to 9, got -1"),
        ({"offsets": np.array([0, 100, 200, 300])}, "test.npz: image 0 must be a JPEG file"),
        ({"labels": np.array([]), "offsets": np.array([0])}, "test.npz must hold images, got none"),
        ({"labels": np.array([{}, {}, {}])}, "test.npz must be an archive of numpy with"),  # a pickle is not run
    ],
)
def test_archives_of_something_else_are_refused(tmp_path, changed, message):
    images, labels = pictures(3)
    write_npz(tmp_path / "cifar10/test.npz", [jpeg(image) for image in images], labels, changed)
    with pytest.raises(ValueError, match=message):
        datasets.cifar10("test", tmp_path)


def test_pictures_of_another_size_and_other_files_are_refused(tmp_path):
    path = write_npz(tmp_path / "cifar10/test.npz", [jpeg(np.zeros((16, 32, 3), np.uint8))], np.array([0]))
    with pytest.raises(ValueError, match=r"test.npz: image 0 must be 32 × 32, got \(16, 32\)"):
        datasets.cifar10("test", tmp_path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"test.npz must be an archive of numpy with"):
        datasets.cifar10("test", tmp_path)


def test_the_published_pictures():
    if not (REAL_DATA / "cifar10").is_dir():
        pytest.skip("needs the images: set OPACUS_EXPM_DATA to a directory with cifar10/")
    found = datasets.cifar10("test", REAL_DATA)
    assert found.images.shape == (10_000, 32, 32, 3)
    assert np.bincount(found.labels).tolist() == [1000] * 10
    assert len(datasets.cifar10("train", REAL_DATA, first=10).labels) == 10


# --- eICU ------------------------------------------------------------------------------------------------------------

PATIENT = {"patientunitstayid": 7, "gender": "Male", "age": "50", "hospitaldischargestatus": "Alive", "uniquepid": "p"}
APACHE = {
    "patientunitstayid": 7,
    "vent": 0,
    "eyes": 4,
    "motor": 6,
    "verbal": 5,
    "urine": 1500,
    "wbc": 9,
    "temperature": 37,
    "respiratoryrate": 20,
    "sodium": 140,
    "heartrate": 80,
    "meanbp": 90,
    "ph": 7.4,
    "hematocrit": 40,
    "creatinine": 1,
    "albumin": 3,
    "pao2": 90,
    "pco2": 40,
    "bun": 20,
    "glucose": 100,
    "bilirubin": 1,
    "fio2": 40,
}
EXPECTED = {
    "age": 50,
    "male": 1,
    "temperature": 37,
    "heart_rate": 80,
    "mean_pressure": 90,
    "respiratory_rate": 20,
    "sodium": 140,
    "glucose": 100,
    "ph": 7.4,
    "hematocrit": 40,
    "creatinine": 1,
    "albumin": 3,
    "bilirubin": 1,
    "bun": 20,
    "white_cells": 9,
    "pao2": 90,
    "paco2": 40,
    "fio2": 0.4,
    "urine": 1500,
    "coma_scale": 15,
    "ventilated": 0,
}


def csv_text(rows):
    lines = [",".join(f'"{name}"' for name in rows[0])]
    lines += [",".join(str(value) for value in row.values()) for row in rows]
    return ("\n".join(lines) + "\n").encode()


def write_eicu(directory, patients, scores):
    put(directory / "eicu_demo/patient.csv.gz", gzip.compress(csv_text(patients)))
    put(directory / "eicu_demo/apacheapsvar.csv.gz", gzip.compress(csv_text(scores)))


def row_of(table, row):
    return dict(zip(table.columns, table.features[row].tolist(), strict=True))


def test_eicu_variables_in_common_units(tmp_path):
    write_eicu(tmp_path, [PATIENT], [APACHE])
    table = datasets.eicu_demo(tmp_path)
    assert table.columns == VARIABLES == tuple(EXPECTED)
    assert row_of(table, 0) == pytest.approx(EXPECTED)
    assert table.deaths.tolist() == [False]


@pytest.mark.parametrize(
    ("patient", "score", "name", "value"),
    [
        ({"age": "> 89"}, {}, "age", 90),
        ({"age": ""}, {}, "age", math.nan),
        ({"gender": "Female"}, {}, "male", 0),
        ({"gender": ""}, {}, "male", math.nan),
        ({}, {"sodium": -1}, "sodium", math.nan),
        ({}, {"sodium": ""}, "sodium", math.nan),
        ({}, {"temperature": 98.6}, "temperature", math.nan),  # °F
        ({}, {"fio2": -1}, "fio2", math.nan),
        ({}, {"fio2": 100}, "fio2", 1),
        ({}, {"motor": 1, "verbal": 1}, "coma_scale", 6),
        ({}, {"motor": -1}, "coma_scale", math.nan),
        ({}, {"eyes": ""}, "coma_scale", math.nan),
        ({}, {"vent": 1}, "ventilated", 1),
    ],
)
def test_eicu_codes(tmp_path, patient, score, name, value):
    write_eicu(tmp_path, [PATIENT | patient], [APACHE | score])
    assert row_of(datasets.eicu_demo(tmp_path), 0) == pytest.approx(EXPECTED | {name: value}, nan_ok=True)


def test_eicu_stays_need_variables_and_an_outcome(tmp_path):
    patients = [
        PATIENT | {"patientunitstayid": number, "age": age, "hospitaldischargestatus": status}
        for number, age, status in ((30, 33, "Expired"), (4, 22, "Alive"), (5, 44, ""), (6, 55, "Alive"))
    ]
    write_eicu(tmp_path, patients, [APACHE | {"patientunitstayid": number} for number in (5, 4, 30)])
    table = datasets.eicu_demo(tmp_path)
    assert table.features[:, 0].tolist() == [22, 33]  # by number of the stay
    assert table.deaths.tolist() == [False, True]


def test_eicu_files_of_another_kind_are_refused(tmp_path):
    write_eicu(tmp_path, [PATIENT], [{"patientunitstayid": 7}])
    with pytest.raises(
        ValueError, match=r"apacheapsvar.csv.gz must have a column 'albumin', got \['patientunitstayid'"
    ):
        datasets.eicu_demo(tmp_path)
    write_eicu(tmp_path, [PATIENT], [APACHE | {"patientunitstayid": 8}])
    with pytest.raises(ValueError, match="must hold stays with variables and outcomes, got none"):
        datasets.eicu_demo(tmp_path)


# --- PhysioNet 2012 --------------------------------------------------------------------------------------------------

STAY = (
    *("Age,50", "Gender,1", "Height,-1", "Temp,37", "HR,70", "HR,90", "MAP,80", "NIMAP,100", "RespRate,20", "Na,140"),
    *("Glucose,100", "pH,7.4", "HCT,40", "Creatinine,1", "Albumin,3", "Bilirubin,1", "BUN,20", "WBC,9", "PaO2,90"),
    *("PaCO2,40", "FiO2,0.4", "Urine,1000", "Urine,2000", "GCS,15", "Lactate,2"),
)


def write_physionet(directory, letter, stays, deaths):
    """``stays`` maps numbers to lines ``parameter,value``; ``deaths`` are the numbers that died."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        folder = tarfile.TarInfo(f"set-{letter}")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, lines in stays.items():
            text = "\n".join(["Time,Parameter,Value", f"00:00,RecordID,{number}", *(f"00:00,{line}" for line in lines)])
            member = tarfile.TarInfo(f"set-{letter}/{number}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    put(directory / f"physionet2012/set-{letter}.tar.gz", buffer.getvalue())
    outcomes = [{"RecordID": number, "SAPS-I": 6, "In-hospital_death": int(number in deaths)} for number in stays]
    put(directory / f"physionet2012/Outcomes-{letter}.txt", csv_text(outcomes))


def test_physionet_variables_in_common_units(tmp_path):
    write_physionet(tmp_path, "b", {12: STAY, 9: ("Age,20", "MechVent,1")}, deaths=[12])
    table = datasets.physionet2012("b", tmp_path)
    assert table.columns == VARIABLES
    assert table.deaths.tolist() == [False, True]  # by number of the stay
    assert row_of(table, 1) == pytest.approx(EXPECTED)
    sparse = dict.fromkeys(VARIABLES, math.nan) | {"age": 20, "ventilated": 1}
    assert row_of(table, 0) == pytest.approx(sparse, nan_ok=True)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("HR,110", "heart_rate", 90),
        ("HR,0", "heart_rate", 80),
        ("pH,735", "ph", 7.4),
        ("Temp,-17.8", "temperature", 37),
        ("FiO2,60", "fio2", 0.5),  # percent
        ("MechVent,1", "ventilated", 1),
        ("GCS,3", "coma_scale", 9),
        ("Urine,500", "urine", 1750),
        ("Gender,-1", "male", 1),
    ],
)
def test_physionet_codes(tmp_path, line, name, value):
    write_physionet(tmp_path, "a", {1: (*STAY, line)}, deaths=[])
    assert row_of(datasets.physionet2012("a", tmp_path), 0) == pytest.approx(EXPECTED | {name: value})


def test_a_parsed_table_is_kept_until_the_files_change(tmp_path, cache, monkeypatch):
    write_physionet(tmp_path, "a", {1: STAY}, deaths=[1])
    first = datasets.physionet2012("a", tmp_path)
    [kept] = cache.rglob("*.npz")
    with monkeypatch.context() as patch:
        patch.delattr(datasets, "_stay")  # not to be parsed again
        again = datasets.physionet2012("a", tmp_path)
        assert np.array_equal(again.features, first.features)
        assert again.deaths.tolist() == first.deaths.tolist()

    for damage in (b"", b"not an archive", kept.read_bytes()[:-40]):
        kept.write_bytes(damage)
        assert np.array_equal(datasets.physionet2012("a", tmp_path).features, first.features)
        with np.load(kept, allow_pickle=False) as mended:
            assert np.array_equal(mended["features"], first.features)

    write_physionet(tmp_path, "a", {1: STAY}, deaths=[])
    assert datasets.physionet2012("a", tmp_path).deaths.tolist() == [False]


def test_physionet_files_that_do_not_belong_together(tmp_path):
    write_physionet(tmp_path, "a", {1: STAY, 2: STAY}, deaths=[])
    outcomes = tmp_path / "physionet2012/Outcomes-a.txt"
    outcomes.write_bytes(csv_text([{"RecordID": 1, "In-hospital_death": 0}]))
    with pytest.raises(ValueError, match=r"Outcomes-a.txt must have the outcome of each stay in .*, got none for 2"):
        datasets.physionet2012("a", tmp_path)
    for content in (b"no archive", (tmp_path / "physionet2012/set-a.tar.gz").read_bytes()[:100]):
        put(tmp_path / "physionet2012/set-a.tar.gz", content)
        with pytest.raises(ValueError, match=r"set-a.tar.gz is no sound tar file"):
            datasets.physionet2012("a", tmp_path)


# --- tables of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_a_table_of_ones_own(tmp_path, compress):
    text = '\ufeffheart rate, mortality ,"lactate"\r\n80,0,1.5\r\n\r\n 1e2 ,1.0,\r\n'.encode()
    path = put(tmp_path / "stays.csv", gzip.compress(text, mtime=0) if compress else text)
    table = datasets.table(path)
    assert table.columns == ("heart rate", "lactate")
    assert np.array_equal(table.features, [[80, 1.5], [100, math.nan]], equal_nan=True)
    assert table.deaths.tolist() == [False, True]
    ordered = datasets.table(str(path), ("lactate", "heart rate"))
    assert np.array_equal(ordered.features, table.features[:, ::-1], equal_nan=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"stays.csv must have a column 'mortality' and at least one feature, got columns \[\]"),
        ("age\n50\n", r"stays.csv must have a column 'mortality' .*got columns \['age'\]"),
        ("mortality\n1\n", r"stays.csv must have a column 'mortality' and at least one feature"),
        ("mortality,age,age\n1,2,3\n", "stays.csv must name each column once, got 'age' more than once"),
        ("mortality,age\n", "stays.csv must have at least one row below its header"),
        ("mortality,age\n0,50\n1\n", "stays.csv, line 3 must have 2 values, as the header, got 1"),
        ("mortality,age\n0,50\n\n2,50\n", "stays.csv, line 4, column 'mortality' must be 0 or 1, got '2'"),
        ("mortality,age\n,50\n", "stays.csv, line 2, column 'mortality' must be 0 or 1, got ''"),
        ("mortality,age\nno,50\n", "stays.csv, line 2, column 'mortality' must be a number, .*got 'no'"),
        ("mortality,age\n0,old\n", "stays.csv, line 2, column 'age' must be a number, or empty if missing, got 'old'"),
        ("mortality,age\n0,nan\n", "stays.csv, line 2, column 'age' must be a number, or empty if missing, got 'nan'"),
        ("mortality,age\n0,-inf\n", "column 'age' must be a number, or empty if missing, got '-inf'"),
        ('mortality,age\n0,"50\n', "stays.csv, line 2 must be CSV: unexpected end of data"),
        ("mortality,âge\n0,50\n", "stays.csv must be text in UTF-8"),
    ],
)
def test_errors_name_file_column_and_line(tmp_path, text, message):
    path = put(tmp_path / "stays.csv", text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        datasets.table(path)


def test_columns_must_be_those_asked_for(tmp_path):
    path = put(tmp_path / "stays.csv", b"mortality,age,ph\n0,50,7.4\n")
    with pytest.raises(ValueError, match=r"stays.csv lacks column 'sodium': the files of a task must have the same"):
        datasets.table(path, ("age", "ph", "sodium"))
    with pytest.raises(ValueError, match=r"stays.csv must not have column 'ph'"):
        datasets.table(path, ("age",))
