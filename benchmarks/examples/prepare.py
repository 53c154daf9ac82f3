"""Data and pretrained starts for two of Opacus's example scripts, to which ``data.patch`` was applied.

    python -m benchmarks.examples.prepare DIRECTORY   # which holds mnist.py and char-lstm-classification.py

* ``mnist``: 10,000 private and 10,000 test digits that are turned by 45 degrees, and the weights of the script's network
  after three epochs on 10,000 upright public ones.
* ``names``: made-up names of six made-up languages, one file for each, as the script wants them; the names that it was
  written for need a download. A language is a law over syllables, of which a name has two to four. The start has seen names
  in which half of the syllables were drawn from all languages alike.

The starts are public, and no part of what is compared.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.newcomers import rotated_digits
from opacus_expm.baselines import non_private

_LANGUAGES = ("Avari", "Belur", "Cendri", "Dovan", "Eskel", "Firuz")
_NAMES, _PUBLIC_NAMES = 8000, 3000


def script(path: Path) -> Any:
    """A script as a module, without running it."""
    found = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def names(number: int, foreign: float, seed: int) -> dict[str, list[str]]:
    """Names by language, with so large a share of syllables from all languages alike."""
    laws = np.random.default_rng(0)  # the same languages every time
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    weights = laws.dirichlet([0.1] * len(syllables), len(_LANGUAGES))
    random, found = np.random.default_rng(seed), {}
    for language, own in zip(_LANGUAGES, weights, strict=True):
        law = (1 - foreign) * own + foreign * weights.mean(0)
        counts = random.integers(2, 5, number // len(_LANGUAGES))
        found[language] = ["".join(random.choice(syllables, c, p=law)).capitalize() for c in counts]
    return found


def write(directory: Path, found: dict[str, list[str]]) -> None:
    """One file for each language."""
    directory.mkdir(parents=True, exist_ok=True)
    for language, lines in found.items():
        (directory / f"{language}.txt").write_text("\n".join(lines) + "\n")


def start(model: nn.Module, public: TensorDataset, path: Path, epochs: int) -> None:
    """Pretrain on public records."""
    made = non_private(model, public, nn.CrossEntropyLoss(), learning_rate=3e-3, batch_size=100, epochs=epochs, seed=0)
    torch.save(made.state_dict(), path)


def main() -> None:
    """Write everything into a directory."""
    directory = Path(sys.argv[1])
    torch.manual_seed(0)
    public, private, test = rotated_digits(0)
    for name, part in (("train", private), ("test", test)):
        torch.save(part.tensors, directory / f"mnist-{name}.pt")
    start(script(directory / "mnist.py").SampleConvNet(), public, directory / "mnist-start.pt", 3)
    write(directory / "names", names(_NAMES, 0.0, 1))
    write(directory / "public-names", names(_PUBLIC_NAMES, 0.5, 2))
    lstm = script(directory / "char-lstm-classification.py")
    dataset = lstm.NamesDataset(directory / "public-names")
    model = lstm.CharNNClassifier(lstm.DPLSTM, 64, 128, len(_LANGUAGES))
    x, y = (torch.stack(parts) for parts in zip(*dataset.samples, strict=True))
    start(model, TensorDataset(x, y), directory / "names-start.pt", 5)


if __name__ == "__main__":
    main()
