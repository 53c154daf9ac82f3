"""What the package needs to know of the user's module: its parameters, how to call it, how to change it.

The user's module is never modified. Statistics are computed on a working copy in evaluation mode, and
the release is a second copy whose parameters are θ* + Aξ.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from opacus_expm.gathering.randomness import Generators
from opacus_expm.subspaces.layout import Layout

_PARALLEL = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel, DataParallel)
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def unwrap(module: nn.Module) -> nn.Module:
    """The module itself, out of the wrappers of ``torch.compile`` and of distributed data parallelism."""
    while True:
        name = "module" if isinstance(module, _PARALLEL) else "_orig_mod"
        inner = getattr(module, name, None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def standard(module: Any) -> Any:
    """A copy of the module inside Opacus's ``GradSampleModule``, without hooks and what they left; others as they are.

    The copy, because taking hooks off changes the module, which may still be in use. What Opacus leaves on parameters is
    not copied; activations of a forward pass without its backward pass are private, and are taken off.
    """
    if not isinstance(module, AbstractGradSampleModule):
        return module
    found = copy.deepcopy(module).to_standard_module()
    for layer in found.modules():
        vars(layer).pop("activations", None)
    return found


def digest(module: nn.Module) -> str:
    """A digest of a module's weights and buffers, and of which of them may move."""
    found = hashlib.sha256(repr([name for name, p in module.named_parameters() if p.requires_grad]).encode())
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor):
            found.update(f"{name} {tensor_digest(tensor)}".encode())
    return found.hexdigest()


def tensor_digest(*tensors: Tensor) -> str:
    """A digest of the types, shapes and bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_module(module: object) -> nn.Module:
    """A module that can be fine-tuned privately, or an error that says why not.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: there is nothing to train, a parameter is not finite, or a layer mixes the records
            of a batch even in evaluation mode.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {module!r} of type {type(module).__name__}")
    module = unwrap(module)
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks.values()]
    if isinstance(module, AbstractGradSampleModule) or any(
        isinstance(getattr(hook, "__self__", None), AbstractGradSampleHooks) for hook in hooks
    ):
        raise ValueError(
            f"model ({type(module).__name__}) was prepared by Opacus, whose hooks would stay in it; pass what the method "
            "to_standard_module() of Opacus's GradSampleModule gives, or the module as it was before"
        )
    if any(isinstance(layer, FullyShardedDataParallel) for layer in module.modules()):
        raise ValueError(
            "model is wrapped by FullyShardedDataParallel, which shards its parameters over ranks; pass the module as it "
            "was before, whole on every rank: a pass shares out the records, not the parameters"
        )
    for name, p in module.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(
                f"model parameter {name!r} is sharded over ranks (FSDP2's fully_shard, or another DTensor); pass the module "
                "as it was before, whole on every rank: a pass shares out the records, not the parameters"
            )
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            "model has no trainable parameter (requires_grad=True), so there is nothing to fine-tune; "
            "call requires_grad_(True) on the parameters that may move"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) and any(p.requires_grad for p in layer.parameters()):
            where = f"layer {name!r} of model" if name else "model"
            raise ValueError(
                f"{where} comes from torch.jit.script or torch.jit.trace, which hides the layers that gradients of single "
                "records need; pass the module as it was before, and script or trace the released one, or freeze its "
                "parameters with requires_grad_(False)"
            )
    for name, p in trainable:
        if not p.is_floating_point():
            raise ValueError(f"model parameter {name!r} has dtype {p.dtype}; only real floating types can move")
        if not bool(torch.isfinite(p).all()):
            raise ValueError(f"model parameter {name!r} holds NaN or infinity; load sound pretrained weights first")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            raise ValueError(
                f"model layer {name!r} ({type(layer).__name__} with track_running_stats=False) normalises by the "
                "other records of the batch even in evaluation mode; use GroupNorm, or running statistics"
            )
    return module


def own_copy(module: nn.Module) -> nn.Module:
    """A copy that shares frozen parameters with the original, which may be most of it: nothing writes to them.

    Trainable ones and buffers are copied, so that neither hooks nor an interruption can reach the user's module.
    """
    shared: dict[int, Any] = {id(p): p for p in module.parameters() if not p.requires_grad}
    return copy.deepcopy(module, shared)


def working_copy(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode and in at least float32, for computing statistics; frozen as ``own_copy`` has it."""
    if any(p.dtype in _LOW_PRECISION for p in module.parameters()):
        return copy.deepcopy(module).eval().float()  # which writes to all of them
    return own_copy(module).eval()


def compute_dtype(module: nn.Module) -> torch.dtype:
    """The floating type in which statistics are computed: float64 for float64 models, else float32."""
    double = any(p.dtype == torch.float64 for p in module.parameters())
    return torch.float64 if double else torch.float32


def cast_inputs(inputs: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Inputs on the model's device; low-precision floating tensors in the statistics' dtype."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.dtype in _LOW_PRECISION else value.to(device)

    return pytree.tree_map(move, inputs)


def take(inputs: Any, piece: slice) -> Any:
    """The records of a batch at the given places."""
    return pytree.tree_map(lambda t: t[piece] if isinstance(t, Tensor) else t, inputs)


def call(module: nn.Module, inputs: Any) -> Any:
    """``module(x)``, ``module(*xs)`` or ``module(**named)``, as the kind of ``inputs`` suggests."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def outputs_of(result: Any) -> Tensor:
    """The output tensor of a call: the result itself, or the ``logits`` of a Hugging Face result."""
    tensor = getattr(result, "logits", result)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"model must return a tensor (or an object with .logits), got {type(result).__name__}; "
            "wrap it in a module that returns the tensor the criterion needs"
        )
    if tensor.dim() not in (2, 3):
        raise ValueError(
            f"model must return a 2-D output (batch, outputs), or a 3-D one (batch, positions, outputs) with a target for "
            f"each position, got shape {tuple(tensor.shape)}; flatten it, or unsqueeze(-1) a single output, in a "
            "wrapping module"
        )
    return tensor


def synthetic_batch(example: Any, copies: int, seed: int) -> Any:
    """``copies`` records of the example's shape: the first the same for every seed, noise in the rest."""
    generator = torch.Generator().manual_seed(0)
    others = torch.Generator().manual_seed(seed)

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        repeated = torch.cat([value] * copies)
        if not value.is_floating_point():  # 0 and 1 are valid indices nearly everywhere
            bits = torch.randint(2, value.shape, generator=generator)
            return torch.cat([bits, *[1 - bits if seed else bits] * (copies - 1)]).to(value)
        first = torch.randn(value.shape, generator=generator)
        rest = torch.randn(repeated[1:].shape, generator=others)
        return torch.cat([first, rest]).to(value)

    return pytree.tree_map(fake, example)


@torch.no_grad()
def draws_at_random(module: nn.Module, example: Any) -> bool:
    """Whether a call of the module draws random numbers; of the example, only the shape is used."""
    generators = Generators.of(module)
    with generators.refreshed():
        before = generators.states()
        with suppress(IndexError, RuntimeError):  # if synthetic records cannot go through, a gatherer will say so
            call(module, synthetic_batch(example, 2, seed=0))
        return generators.drawn_since(before)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """No autocast and no TF32 inside: statistics must not be rounded to a coarser type."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention in plain operations: vmap has no rule for torch's fused inference kernels."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule has its own mode back."""
    modes = {layer: layer.training for layer in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a graphics card or on the host."""
    words = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and any(w in words for w in ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed"))
    )


def check_resolution(module: nn.Module, radius: float, size: int) -> None:
    """Refuse, before anything is charged, a radius that the parameters' floating type cannot express."""
    step = radius / math.sqrt(size)
    for name, p in module.named_parameters():
        if not p.requires_grad or p.numel() == 0:
            continue
        resolution = float(p.detach().abs().min()) * torch.finfo(p.dtype).eps / 2
        if step < resolution / 4:
            raise ValueError(
                f"radius={radius!r} moves a parameter by about {step:.1e}, below the resolution {resolution:.1e} of "
                f"{name!r} in {p.dtype}: it would not change; pass model.float(), or a larger radius"
            )


@torch.no_grad()
def moved(module: nn.Module, layout: Layout, update: Tensor) -> nn.Module:
    """A plain copy of ``module`` with parameters θ* + update; its mode is kept, its gradients are not."""
    result = copy.deepcopy(module)
    result.zero_grad(set_to_none=True)
    parameters = dict(result.named_parameters())
    for name, shape, place in layout.slices():
        p = parameters[name]
        wide = torch.promote_types(p.dtype, update.dtype)
        p.copy_((p.to(wide) + update[place].view(shape).to(p.device, wide)).to(p.dtype))
    return result
