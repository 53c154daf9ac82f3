"""What Opacus's ``make_private`` asks for, in the words of ``make_private_with_epsilon``: its ε by Opacus's own accountant.

**Privacy:** computed from the noise, the sample rate and the epochs alone; nothing is read, charged or released.
"""

from __future__ import annotations

import warnings

from opacus.accountants import create_accountant
from torch.utils.data import DataLoader

from opacus_expm import _check
from opacus_expm.gathering import loaders

_EPOCHS = (1, 5, 10, 20)  # shown where the script's own are not known; the call is written for the third


def epsilon_of(noise_multiplier: float, sample_rate: float, epochs: int, delta: float) -> float:
    """ε of DP-SGD by the accountant that ``opacus.PrivacyEngine`` has by default.

    Args:
        noise_multiplier: σ > 0.
        sample_rate: 1/batches, as Opacus takes it.
        epochs: E, of 1/rate steps each.
        delta: δ.
    """
    accountant = create_accountant("prv")
    accountant.history = [(noise_multiplier, sample_rate, epochs * int(1 / sample_rate))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its numerics
        return float(accountant.get_epsilon(delta=delta))


def equivalent_call(
    data_loader: DataLoader[object],
    noise_multiplier: float,
    max_grad_norm: object,
    target_delta: float,
    epochs: int | None,
    *,
    ghost: bool,
) -> str:
    """An explanation, and the call that asks this engine for as much privacy.

    Args:
        data_loader: whose batches give the sample rate.
        noise_multiplier: σ.
        max_grad_norm: as it came.
        target_delta: δ.
        epochs: of the loop, if they are known.
        ghost: whether four values are returned.
    """
    batches = len(loaders.check_loader(data_loader, "data_loader"))
    _check.positive("noise_multiplier", noise_multiplier)
    _check.positive("target_delta", _check.fraction("target_delta", target_delta))
    shown = _EPOCHS if epochs is None else (_check.positive_int("epochs", epochs),)
    spent = {e: f"{epsilon_of(noise_multiplier, 1 / batches, e, target_delta):.3g}" for e in shown}
    chosen = shown[min(2, len(shown) - 1)]
    costs = ", ".join(f"{found} in {e} epoch{'s' if e > 1 else ''}" for e, found in spent.items())
    other = f"; for others call make_private(..., epochs=E, target_delta={target_delta:g})" if epochs is None else ""
    lines = ["module=module", "optimizer=optimizer", "data_loader=data_loader", f"target_epsilon={spent[chosen]}"]
    lines += [f"target_delta={target_delta:g}", f"epochs={chosen}", f"max_grad_norm={max_grad_norm!r}"]
    values = "module, optimizer, criterion, data_loader" if ghost else "module, optimizer, data_loader"
    arguments = "".join(f"    {line},\n" for line in [*lines, *(["grad_sample_mode='ghost'"] if ghost else [])])
    return (
        f"make_private(noise_multiplier={noise_multiplier:g}) says how noisy a step is, and this engine is told how private "
        f"the result is. By Opacus's accountant these numbers (sample rate 1/{batches}, delta={target_delta:g}) have an "
        f"epsilon of {costs}. The same privacy for a loop of {chosen} epoch{'s' if chosen > 1 else ''}{other}:\n\n"
        f"{values} = engine.make_private_with_epsilon(\n{arguments})\n"
    )
