"""The modes of training with less activation memory that the activation benchmark compares."""

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.activations.model import Saved
from benchmarks.cells import UnavailableError
from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations import OffloadStats

THRESHOLD_MB = 1.0
NON_REENTRANT = {"use_reentrant": False}
MAX_PASSES_TO_SETTLE = 8


@dataclass(frozen=True)
class Setting:
    model: nn.Module  # without checkpointing
    device: torch.device
    saved: Saved  # for one step
    host_limit_bytes: int


@dataclass(frozen=True)
class Handling:
    """One mode, ready to train."""

    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around a forward pass
    stats: Callable[[], OffloadStats | None] = lambda: None  # of this library's offloader
    budget_bytes: int | None = None  # of saved activations
    is_planned: bool = False  # needs passes to record and plan


def none(setting: Setting) -> Handling:
    return Handling()


def checkpointing(setting: Setting, *, offload: bool = False) -> Handling:
    """Switch on transformers' checkpointing; `offload` uses its own switch (since 5.17), or does the same by hand."""
    model = setting.model
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    own_switch = {"offload": True} if offload and "offload" in inspect.signature(enable).parameters else {}
    enable(NON_REENTRANT, **own_switch)
    if offload and not own_switch:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = _checkpoint_on_cpu
    return Handling()


def _checkpoint_on_cpu(*arguments: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return checkpoint(*arguments, **NON_REENTRANT, **options)


def torch_save_on_cpu(setting: Setting) -> Handling:
    require_host_memory("save_on_cpu", setting.saved, setting.host_limit_bytes)
    return Handling(lambda: save_on_cpu(pin_memory=True))


def trl(setting: Setting) -> Handling:
    if setting.device.type == "cpu":
        raise UnavailableError("needs an accelerator")
    make_manager = managers_of_trl()
    require_host_memory("TRL", setting.saved, setting.host_limit_bytes)
    manager = make_manager(setting.model, warn_if_no_head=False)
    return Handling(lambda: manager)


def managers_of_trl() -> Callable[..., Any]:
    """Return TRL's function that makes a context for `activation_offloading=True`, as its trainers install it."""
    try:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager
    except ImportError as error:
        raise UnavailableError("TRL is not installed") from error
    return get_act_offloading_ctx_manager


# Host memory of the modes that move everything.
PINNED_BYTES: dict[str, Callable[[Saved], int]] = {
    "TRL": lambda saved: saved.unique_pinned_bytes,
    "save_on_cpu": lambda saved: saved.views_pinned_bytes,
}


def require_host_memory(mode: str, saved: Saved, limit_bytes: int) -> None:
    num_bytes = PINNED_BYTES[mode](saved) if mode in PINNED_BYTES else 0
    if num_bytes > limit_bytes:
        raise UnavailableError(f"needs {num_bytes / 2**30:.0f} GiB of host memory, limit {limit_bytes / 2**30:.0f} GiB")


def ours_inputs(setting: Setting) -> Handling:
    checkpointing(setting)
    return ours(setting, mode="inputs")


def ours_auto(setting: Setting, share: float) -> Handling:
    return ours(setting, mode="auto", budget_bytes=round(share * setting.saved.unique_bytes))


def ours(setting: Setting, *, mode: str, budget_bytes: int | None = None, **options: Any) -> Handling:
    on_cpu = setting.device.type == "cpu"
    offloader = ActivationOffloader(
        mode=mode,
        budget_gib=None if budget_bytes is None else budget_bytes / 2**30,
        host_budget_gib=setting.host_limit_bytes / 2**30,
        copier=SyncCopier() if on_cpu else None,
        **{"offload_threshold_mb": 0 if on_cpu else THRESHOLD_MB, **options},
    )
    return Handling(
        lambda: offloader.offload_context(setting.model),
        lambda: offloader.stats,
        budget_bytes,
        is_planned=mode == "auto",
    )


def settle(handling: Handling, step: Callable[[], None], num_passes: int) -> None:
    """Run untimed passes; in modes that plan, until two passes have followed the plan."""
    for _ in range(num_passes):
        step()
    for _ in range(MAX_PASSES_TO_SETTLE if handling.is_planned else 0):
        stats = handling.stats()
        if stats is not None and stats.predicted_step_ms is not None:
            step()
            step()
            return
        step()


# References first, then this library's modes, then others, so that a run that ends early has the targets' figures.
MODES: dict[str, Callable[[Setting], Handling]] = {
    "none": none,
    "checkpointing": checkpointing,
    "ours inputs": ours_inputs,
    "ours auto 10 %": partial(ours_auto, share=0.10),
    "ours auto 20 %": partial(ours_auto, share=0.20),
    "ours auto 35 %": partial(ours_auto, share=0.35),
    # As much as 3 % of time can save, and more where the device has no room: the default.
    "ours auto": partial(ours, mode="auto"),
    "checkpoint offload": partial(checkpointing, offload=True),
    "TRL": trl,
    "save_on_cpu": torch_save_on_cpu,
    # Two tensors ahead on the way back, as in this library's first design.
    "all above 10 MB": partial(ours, mode="all", offload_threshold_mb=10.0, prefetch_ahead=2),
}
OURS = tuple(mode for mode in MODES if mode.startswith("ours"))
