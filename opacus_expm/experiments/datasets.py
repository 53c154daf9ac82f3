"""The data sets behind the experiments: which files they are, and how these are read.

A data directory holds ``mnist/``, ``physionet2012/``, ``eicu_demo/``, ``sms_spam/`` and ``cifar10/``, each with the files
of its publisher, gzip or not; :func:`cifar10` reads a smaller form, too. Where the directory is looked for is said in
:mod:`opacus_expm.experiments.downloads`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opacus_expm.experiments import optional
from opacus_expm.experiments.downloads import AnyPath, File, cache_dir, find, present, read, remember

_READER = 1  # version of the clinical readers: a change makes tables in the cache obsolete


# --- files -----------------------------------------------------------------------------------------------------------


def _mnist(name: str, sha256: str) -> File:
    """One IDX file; the mirrors are those of PyTorch and TensorFlow."""
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    return File(f"mnist/{name}", tuple(f"{mirror}{name}.gz" for mirror in mirrors), sha256)


# Of the uncompressed files, as published in many places.
MNIST = (
    _mnist("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    _mnist("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    _mnist("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    _mnist("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)

_CHALLENGE = "https://physionet.org/files/challenge-2012/1.0.0/"

# PhysioNet lists no digests for these files. Those of the archives, compressed, are the ones that other public loaders
# of this data set check; those of the outcomes are of the text, and the same loaders agree with ours.
PHYSIONET2012 = {
    letter: (
        File(f"physionet2012/set-{letter}.tar", (f"{_CHALLENGE}set-{letter}.tar.gz",), archive, packed=True),
        File(f"physionet2012/Outcomes-{letter}.txt", (f"{_CHALLENGE}Outcomes-{letter}.txt",), outcomes),
    )
    for letter, archive, outcomes in (
        (
            "a",
            "8cb250f179cd0952b4b9ebcf8954b63d70383131670fac1cfee13deaa13ca920",
            "2613ea60ccda29f87571a7d6b09ad130858a8ccd66325bd073365925026883c2",
        ),
        (
            "b",
            "b1637a2a423a8e76f8f087896cfc5fdf28f88519e1f4e874fbda69b2a64dac30",
            "1305f29734da374a809483229a99f33a9230aa8d4fa74b1a2d6ad788136423d5",
        ),
        (
            "c",
            "a4a56b95bcee4d50a3874fe298bf2998f2ed0dd98a676579573dc10419329ee1",
            "0b32dcb7753c0f18f2f5fde498a28618b8879c5e527ce0dae8ad120dd7e205c9",
        ),
    )
}

_DEMO = "https://physionet.org/files/eicu-crd-demo/2.0.1/"

# Of the decompressed tables in the copy of the demo that this package is tested with; not compared with a published
# digest, for we know of none.
EICU_DEMO = (
    File(
        "eicu_demo/patient.csv",
        (f"{_DEMO}patient.csv.gz",),
        "2f3033e5f5a4075c88a90d9981aec4afe065f88517fd6e5b8b09a4881c55e755",
    ),
    File(
        "eicu_demo/apacheapsvar.csv",
        (f"{_DEMO}apacheapsvar.csv.gz",),
        "7d6a26118d5a666b7efca6677593caa319328057a854ee11d4c5df26e9d39f89",
    ),
)

# Of the text as published; several public loaders give the same digest.
SMS_SPAM = File(
    "sms_spam/SMSSpamCollection",
    ("https://archive.ics.uci.edu/static/public/228/sms+spam+collection.zip",),
    "7d039a24a6083ed9ef0f806ebad56bbb976e3aeb8de05669173bfdc4996c239d",
    member="SMSSpamCollection",
)

# Of the archive, compressed; several public loaders check the same digest.
CIFAR10 = File(
    "cifar10/cifar-10-binary.tar",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    packed=True,
)


# --- MNIST -----------------------------------------------------------------------------------------------------------


def idx(path: Path) -> npt.NDArray[np.uint8]:
    """An array of bytes in MNIST's IDX format, gzip or not.

    Raises:
        ValueError: the file is something else, or is cut off.
    """
    content = read(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} must be an IDX file of bytes, which starts with 00 00 08, got {content[:3].hex(' ')!r}"
        )
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} must hold an array of shape {shape} and nothing else, got {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def mnist(data_dir: AnyPath | None = None) -> tuple[npt.NDArray[np.uint8], ...]:
    """MNIST as published: training images and labels, test images and labels."""
    paths = [find(file, data_dir) for file in MNIST]
    arrays = tuple(idx(path) for path in paths)
    for images, labels, path in zip(arrays[::2], arrays[1::2], paths[::2], strict=True):
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{path} must hold images of 28 × 28 with one label each, got {images.shape} and labels {labels.shape}"
            )
    return arrays


# --- CIFAR-10 --------------------------------------------------------------------------------------------------------

_CIFAR10_PARTS = {
    "train": tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("cifar-10-batches-bin/test_batch.bin",),
}


def cifar10(part: str, data_dir: AnyPath | None = None, *, first: int | None = None) -> Pictures:
    """The training or the test images of CIFAR-10 (Krizhevsky 2009), in the order of the file.

    What is downloaded is the publisher's archive, ``cifar10/cifar-10-binary.tar.gz``. Where ``cifar10/train.npz`` and
    ``cifar10/test.npz`` are there, they are read instead: the same images as JPEG, in a third of the space, with slightly
    other pixels and in another order. These two files cannot be downloaded. To make one, store with ``numpy.savez`` the
    arrays ``jpeg`` (the bytes of all JPEG files in a row, uint8), ``offsets`` (image i is
    ``jpeg[offsets[i]:offsets[i + 1]]``) and ``labels`` (0 to 9).

    Args:
        part: ``"train"`` or ``"test"``, 50,000 and 10,000 images.
        data_dir: directory with ``cifar10/``, looked into first.
        first: read no more than this many images, from the beginning.

    Raises:
        FileNotFoundError: the images are neither there nor can they be downloaded.
        ImportError: they are JPEG, and Pillow is not installed.
        ValueError: a file holds something else.
    """
    path = present(f"cifar10/{part}.npz", data_dir)
    found = _jpegs(path, first) if path else _batches(find(CIFAR10, data_dir), _CIFAR10_PARTS[part])
    return Pictures(found.images[:first], found.labels[:first])


@dataclass(frozen=True)
class Pictures:
    """Small colour pictures of ten kinds.

    Attributes:
        images: red, green and blue from 0 to 255, of shape (pictures, 32, 32, 3).
        labels: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck as 0 to 9, of shape (pictures,).
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


def _batches(archive: Path, members: Iterable[str]) -> Pictures:
    """Pictures from CIFAR-10's binary archive: a label and the three colours, plane by plane, for each of them."""
    content = b""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as files:
            for member in members:
                file = files.extractfile(member)
                content += file.read() if file is not None else b""
    except (tarfile.TarError, EOFError, KeyError, zlib.error) as error:
        raise ValueError(f"{archive} is no sound tar file of CIFAR-10's binary version: {error}") from error
    if not content or len(content) % 3073:
        raise ValueError(f"{archive} must hold records of 3,073 bytes, got {len(content)} bytes")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3073)
    return Pictures(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), _kinds(archive, rows[:, 0]))


def _jpegs(path: Path, first: int | None) -> Pictures:
    """Pictures from a file of many JPEGs."""
    picture = optional.load("PIL.Image", "pillow")
    try:
        with np.load(io.BytesIO(read(path)), allow_pickle=False) as arrays:
            content, labels = arrays["jpeg"].tobytes(), arrays["labels"][:first]
            offsets = arrays["offsets"][: None if first is None else first + 1]
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be an archive of numpy with 'jpeg', 'offsets' and 'labels': {error}") from error
    if labels.ndim != 1 or offsets.shape != (len(labels) + 1,):
        raise ValueError(
            f"{path} must have one offset more than labels, got {offsets.shape} offsets and {labels.shape} labels"
        )
    images = []
    for number, (start, end) in enumerate(itertools.pairwise(offsets)):
        try:
            image = np.asarray(picture.open(io.BytesIO(content[start:end])).convert("RGB"))
        except OSError as error:
            raise ValueError(f"{path}: image {number} must be a JPEG file: {error}") from error
        if image.shape != (32, 32, 3):
            raise ValueError(f"{path}: image {number} must be 32 × 32, got {image.shape[:2]}")
        images.append(image)
    if not images:
        raise ValueError(f"{path} must hold images, got none")
    return Pictures(np.stack(images), _kinds(path, labels))


def _kinds(path: Path, labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Labels, which must be those of ten kinds."""
    wrong = labels[(labels < 0) | (labels > 9)]
    if len(wrong):
        raise ValueError(f"{path} must have labels from 0 to 9, got {wrong[0]}")
    return labels.astype(np.uint8)


# --- text messages ---------------------------------------------------------------------------------------------------


def sms_spam(data_dir: AnyPath | None = None) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """The UCI SMS Spam Collection (CC BY 4.0): 5,574 messages and whether each is spam, in the order of the file.

    Some messages occur more than once. A split into a public and a private part, or into training and test, should keep
    equal messages on one side.

    Raises:
        ValueError: a line that is not ``ham`` or ``spam``, a tab and a message.
    """
    path = find(SMS_SPAM, data_dir)
    texts, spam = [], []
    for number, line in enumerate(_text(path).split("\n"), start=1):  # a message may hold other line separators
        if not line.strip():
            continue
        label, tab, text = line.rstrip("\r").partition("\t")
        if label not in ("ham", "spam") or not tab:
            raise ValueError(f"{path}, line {number} must be 'ham' or 'spam', a tab and a message")
        texts.append(text)
        spam.append(label == "spam")
    if not texts:
        raise ValueError(f"{path} must hold messages, got none")
    return texts, np.array(spam)


# --- clinical tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A clinical table with one row for each stay.

    Attributes:
        columns: names of the features.
        features: of shape (stays, columns), NaN where a value is missing.
        deaths: whether the patient died in hospital, of shape (stays,).
    """

    columns: tuple[str, ...]
    features: npt.NDArray[np.float64]
    deaths: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Variable:
    """A quantity that both databases have, its names there and its plausible range; other values are missing."""

    name: str
    eicu: str
    physionet: tuple[str, ...]
    low: float
    high: float


_VARIABLES = (
    _Variable("age", "age", ("Age",), 15, 120),
    _Variable("male", "gender", ("Gender",), 0, 1),
    _Variable("temperature", "temperature", ("Temp",), 25, 45),  # °C
    _Variable("heart_rate", "heartrate", ("HR",), 10, 300),
    _Variable("mean_pressure", "meanbp", ("MAP", "NIMAP"), 10, 250),  # invasive or not, mmHg
    _Variable("respiratory_rate", "respiratoryrate", ("RespRate",), 2, 80),
    _Variable("sodium", "sodium", ("Na",), 90, 200),
    _Variable("glucose", "glucose", ("Glucose",), 10, 2000),
    _Variable("ph", "ph", ("pH",), 6.5, 8),
    _Variable("hematocrit", "hematocrit", ("HCT",), 5, 75),
    _Variable("creatinine", "creatinine", ("Creatinine",), 0.05, 30),
    _Variable("albumin", "albumin", ("Albumin",), 0.5, 8),
    _Variable("bilirubin", "bilirubin", ("Bilirubin",), 0.05, 80),
    _Variable("bun", "bun", ("BUN",), 1, 300),
    _Variable("white_cells", "wbc", ("WBC",), 0.05, 500),
    _Variable("pao2", "pao2", ("PaO2",), 15, 800),
    _Variable("paco2", "pco2", ("PaCO2",), 5, 200),
    _Variable("fio2", "fio2", ("FiO2",), 0.2, 1),  # a fraction
    _Variable("urine", "urine", ("Urine",), 0, 20_000),  # ml a day
    _Variable("coma_scale", "coma", ("GCS",), 3, 15),  # eICU: eyes + motor + verbal
    _Variable("ventilated", "vent", ("MechVent",), 0, 1),
)
VARIABLES = tuple(variable.name for variable in _VARIABLES)
_COMA = ("eyes", "motor", "verbal")
_EICU_SCORES = {variable.eicu for variable in _VARIABLES} - {"age", "gender", "coma"}
_PARAMETERS = {name: index for index, variable in enumerate(_VARIABLES) for name in variable.physionet}
_URINE, _VENTILATED = VARIABLES.index("urine"), VARIABLES.index("ventilated")


def eicu_demo(data_dir: AnyPath | None = None) -> Table:
    """The eICU demo: APACHE variables and outcomes of the stays that have both, in the order of their numbers.

    The values are those that entered the APACHE score, the worst of the first day. An age of "> 89" is read as 90.
    A patient can have several stays, so rows are not to be divided between two sides at random. (The tasks here keep
    all of them on the public side.)
    """
    paths = [find(file, data_dir) for file in EICU_DEMO]
    patients = _records(paths[0], ("patientunitstayid", "hospitaldischargestatus", "age", "gender"))
    scores = _records(paths[1], ("patientunitstayid", *_COMA, *_EICU_SCORES))
    apache = {row["patientunitstayid"]: row for row in scores}
    rows, deaths = [], []
    for row in sorted(patients, key=lambda row: int(row["patientunitstayid"])):
        outcome = row["hospitaldischargestatus"]
        if row["patientunitstayid"] not in apache or outcome not in ("Alive", "Expired"):
            continue
        text = row | apache[row["patientunitstayid"]]
        text["age"] = text["age"].replace("> 89", "90")
        text["gender"] = {"Male": "1", "Female": "0"}.get(text["gender"], "")
        values = {name: float(text[name] or "nan") for name in ("age", "gender", *_COMA, *_EICU_SCORES)}
        coma = [values[part] for part in _COMA]
        values["coma"] = sum(coma) if all(part > 0 for part in coma) else math.nan
        values["fio2"] /= 100
        rows.append([_plausible(values[variable.eicu], variable) for variable in _VARIABLES])
        deaths.append(outcome == "Expired")
    return _table(paths, rows, deaths)


def physionet2012(letter: str, data_dir: AnyPath | None = None) -> Table:
    """Set a, b or c of the PhysioNet/CinC Challenge 2012: 4,000 stays each, in the order of their numbers.

    A value is the mean of its measurements in the stay's first 48 hours, apart from two: urine is the sum over the
    measurements for one day, and a stay is ventilated if it ever was. The parsed table is kept in the cache.
    """
    paths = [find(file, data_dir) for file in PHYSIONET2012[letter]]
    digest = hashlib.sha256(f"{_READER}".encode())
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    kept = cache_dir() / "tables" / f"physionet2012-{letter}-{digest.hexdigest()[:16]}.npz"
    try:
        with np.load(io.BytesIO(kept.read_bytes()), allow_pickle=False) as arrays:
            return Table(VARIABLES, arrays["features"], arrays["deaths"])
    except Exception:  # absent, or damaged in one of many ways: read the files again
        pass
    archive, outcomes = paths
    rows = _records(outcomes, ("RecordID", "In-hospital_death"))
    died = {row["RecordID"]: row["In-hospital_death"] == "1" for row in rows}
    stays = dict(_stays(archive))
    unknown = sorted(stays.keys() - died.keys())
    if unknown:
        raise ValueError(f"{outcomes} must have the outcome of each stay in {archive}, got none for {unknown[0]}")
    numbers = sorted(stays, key=int)
    table = _table(paths, [stays[number] for number in numbers], [died[number] for number in numbers])
    buffer = io.BytesIO()
    np.savez(buffer, features=table.features, deaths=table.deaths)
    remember(kept, buffer.getvalue())
    return table


def _records(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a published table, which must have these columns."""
    reader = csv.DictReader(io.StringIO(_text(path)))
    lacking = sorted(set(columns) - set(reader.fieldnames or ()))
    if lacking:
        raise ValueError(f"{path} must have a column {lacking[0]!r}, got {reader.fieldnames}")
    return list(reader)


def _text(path: Path) -> str:
    """The content of a file in UTF-8."""
    try:
        return read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8: {error}") from error


def _stays(archive: Path) -> Iterator[tuple[str, list[float]]]:
    """Number and variables of each stay in an archive of text files."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as members:
            for member in members:
                file = members.extractfile(member) if member.name.endswith(".txt") else None
                if file is not None:
                    yield Path(member.name).stem, _stay(file.read().decode())
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} is no sound tar file: {error}") from error


def _stay(text: str) -> list[float]:
    """Variables of one stay from its lines ``time,parameter,value``."""
    measured: list[list[float]] = [[] for _ in _VARIABLES]
    for line in text.splitlines()[1:]:
        _, parameter, value = line.split(",")
        index = _PARAMETERS.get(parameter)
        if index is not None:
            number = float(value)
            if parameter == "FiO2" and number > 1:  # a few are in percent
                number /= 100
            number = _plausible(number, _VARIABLES[index])
            if not math.isnan(number):
                measured[index].append(number)
    means = [sum(values) / len(values) if values else math.nan for values in measured]
    urine = measured[_URINE]
    means[_URINE] = sum(urine) / 2 if urine else math.nan
    means[_VENTILATED] = float(any(measured[_VENTILATED]))
    return means


def _plausible(value: float, variable: _Variable) -> float:
    """The value, or NaN if it cannot be one; −1 stands for missing in both databases."""
    return value if variable.low <= value <= variable.high else math.nan


def _table(paths: Iterable[Path], rows: list[list[float]], deaths: list[bool]) -> Table:
    """A table of the shared variables."""
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))} must hold stays with variables and outcomes, got none")
    return Table(VARIABLES, np.array(rows), np.array(deaths))


def table(path: AnyPath, columns: tuple[str, ...] | None = None) -> Table:
    """A clinical table of one's own: a CSV file with a header and one row a stay.

    The column ``mortality`` is 0 or 1; every other column is a feature, a number or empty if missing.

    Args:
        path: the file, UTF-8, gzip or not.
        columns: the features that it must have, in the order in which they are returned; default: those it has.

    Raises:
        ValueError: names the file, and the column and line where something else was found.
    """
    path = Path(path)
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        lines = [([cell.strip() for cell in row], f"{path}, line {reader.line_num}") for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num} must be CSV: {error}") from error
    header = lines[0][0] if lines else []
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise ValueError(f"{path} must name each column once, got {twice[0]!r} more than once")
    if "mortality" not in header or len(header) < 2:
        raise ValueError(f"{path} must have a column 'mortality' and at least one feature, got columns {header}")
    if columns is None:
        columns = tuple(name for name in header if name != "mortality")
    different = sorted(set(columns) ^ (set(header) - {"mortality"}))
    if different:
        problem = "lacks" if different[0] in columns else "must not have"
        raise ValueError(f"{path} {problem} column {different[0]!r}: the files of a task must have the same columns")
    if len(lines) < 2:
        raise ValueError(f"{path} must have at least one row below its header")
    rows, deaths = [], []
    for row, where in lines[1:]:
        if len(row) != len(header):
            raise ValueError(f"{where} must have {len(header)} values, as the header, got {len(row)}")
        cells = dict(zip(header, row, strict=True))
        death = _number(cells["mortality"], f"{where}, column 'mortality'")
        if death not in (0, 1):
            raise ValueError(f"{where}, column 'mortality' must be 0 or 1, got {cells['mortality']!r}")
        deaths.append(death == 1)
        rows.append([_number(cells[name], f"{where}, column {name!r}") for name in columns])
    return Table(columns, np.array(rows), np.array(deaths))


def _number(cell: str, where: str) -> float:
    """A finite number, or NaN for an empty cell."""
    try:
        value = float(cell or "nan")
    except ValueError:
        value = math.inf
    if math.isinf(value) or (cell and math.isnan(value)):
        raise ValueError(f"{where} must be a number, or empty if missing, got {cell!r}")
    return value
