"""Released weights and the ledger in one file, as ``opacus.PrivacyEngine`` saves them; never statistics."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opacus_expm import _files
from opacus_expm._warnings import warn
from opacus_expm.accounting.accountant import ExpMAccountant
from opacus_expm.gathering.model import tensor_digest


def save(
    path: str | os.PathLike[str], module: nn.Module, accountant: ExpMAccountant, more: dict[str, Any] | None
) -> None:
    """Write the file as a whole, or leave an earlier one as it was."""
    _check_module(module)
    content = dict(more or {})
    content["module_state_dict"] = module.state_dict()
    content["privacy_accountant_state_dict"] = accountant.state_dict()
    with _files.replacing(path) as file:
        torch.save(content, file)


def load(path: str | os.PathLike[str], module: nn.Module, accountant: ExpMAccountant) -> dict[str, Any]:
    """Load weights and ledger, both or neither, without running code from the file; the user's own entries are left.

    Raises:
        ValueError: the file is no such checkpoint, or its ledger lacks charges; module and ledger are unchanged.
    """
    _check_module(module)
    content = _files.load_tensors(path)
    needed = ("module_state_dict", "privacy_accountant_state_dict")
    if not isinstance(content, dict) or any(not isinstance(content.get(key), dict) for key in needed):
        raise ValueError(f"{os.fspath(path)!r} is not a checkpoint of ExpMQuadEngine: it needs {' and '.join(needed)}")
    before = copy.deepcopy(module.state_dict())
    try:
        module.load_state_dict(content.pop("module_state_dict"))
        accountant.load_state_dict(content.pop("privacy_accountant_state_dict"))
    except BaseException as error:  # an interrupt, too, must not leave new weights with an old ledger
        module.load_state_dict(before)
        if not isinstance(error, Exception):
            raise
        # torch fails in many ways on weights that are none
        raise ValueError(f"{os.fspath(path)!r} does not fit this module or ledger: {error}") from error
    return content


class Given:
    """What an engine gave out, as digests of weights, and how many of the ledger's charges were for it."""

    def __init__(self) -> None:
        self._weights: set[str] = set()
        self._paid = 0

    def giving(self, make: Callable[[], nn.Module], accountant: ExpMAccountant) -> nn.Module:
        """What ``make`` gives, remembered with what it cost."""
        before = len(accountant)
        module = make()
        self._paid += len(accountant) - before
        self.remember(module)
        return module

    def remember(self, module: nn.Module) -> None:
        """Know these weights from now on."""
        self._weights.add(weights_digest(module))

    def check(self, module: nn.Module, accountant: ExpMAccountant) -> None:
        """Warn where a module cannot be what the ledger was charged for: all charges are for others."""
        if self._paid == len(accountant) and weights_digest(module) not in self._weights:
            warn(
                "module does not have the weights of a release of this engine, so that the ledger beside it does not say "
                "what they cost: save what make_private_expm() gave, unless you changed it since without private data"
            )


def weights_digest(module: nn.Module) -> str:
    """A digest of what a checkpoint keeps of a module."""
    _check_module(module)
    return tensor_digest(*(entry for entry in module.state_dict().values() if isinstance(entry, Tensor)))


def _check_module(module: object) -> None:
    """Raise for anything that has no weights."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
