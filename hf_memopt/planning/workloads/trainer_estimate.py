"""The peak memory of a trainer's own training steps, before it trains."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_memopt.planning.cards.gpus import Card, find_card
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.estimate_report import MemoryEstimate
from hf_memopt.planning.simulated_step import RepeatedLayers, SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.planning.simulation.patched_trl import generates
from hf_memopt.planning.workload import num_steps
from hf_memopt.planning.workloads.simulated_trainer import MODEL, SimulatedTrainer, modules_of, offloader_of
from hf_memopt.planning.workloads.trainer_batches import TrainerWindow, largest_window
from hf_memopt.ranges import COUNT
from hf_memopt.weights.base import streamed_weights_of

logger = logging.getLogger(__name__)


def estimate_trainer(trainer: Trainer, *, gpu: str | Card | None = None, num_batches: int = 100) -> MemoryEstimate:
    """Say how much device memory the training steps of a trainer will need, without the device.

    The trainer's own `train` runs on a simulated accelerator for two steps, or four with an offloader that plans, with
    its data, reference model and the parts that `attach` has attached; other callbacks, evaluation and saving do not
    run. That is in a forked process, so the trainer and its weights stay as they are.

    Args:
        trainer: transformers' Trainer or a descendant, such as TRL's SFTTrainer and DPOTrainer, on the CPU
            (`use_cpu=True`). With `bf16_full_eval=True` its model may also be on "meta", where it takes no memory.
        gpu: as for `estimate_peak_memory`.
        num_batches: of its data that are looked at; the update with the largest is simulated. If the data
            has more, `assumptions` says so.

    Raises:
        ValueError: the trainer trains in a way that is not simulated (several processes, FSDP, DeepSpeed, weights that
            are quantised, on a device or streamed, generation but for GRPO's, Liger's kernels, TRL's own offloading,
            reference values computed beforehand), naming it; an offloader plans and there is no `gpu`; it has no
            training data; see also `estimate_peak_memory`.
        IsolatedError: a training step failed.

    Cost: some 50 ms for each layer, step and micro-batch, and drawing the batches.

    Example:
        >>> estimate = estimate_trainer(trainer, gpu="rtx4090")
        >>> print(estimate)
        >>> estimate.peak_bytes / 2**30
    """
    COUNT.check("num_batches", num_batches)
    _refuse(trainer)
    if _plans(trainer) and gpu is None:
        raise ValueError("gpu=None: the attached offloader weighs copies against compute, so name a gpu")
    card = None if gpu is None else find_card(gpu)
    estimate, simulated = run_isolated(lambda: _estimate(trainer, num_batches, card))
    logger.info("estimated with batches of %s", simulated)
    return estimate


def trainer_step(trainer: Trainer, window: TrainerWindow, repeated: RepeatedLayers | None = None) -> SimulatedStep:
    """Return the update of a trainer on the host, for one simulation, to which the trainer is lost."""
    num_micro_batches = min(2, len(window.batches))

    def setup(device: torch.device) -> tuple[Any, ...]:
        simulated = SimulatedTrainer(trainer, window, device)
        return simulated.modules, simulated.batches, simulated

    return SimulatedStep(
        setup=setup,
        step=lambda state: state[-1].step(),
        num_steps=num_steps("auto" if _plans(trainer) else "off", num_micro_batches),
        num_micro_batches=num_micro_batches,
        repeated=repeated,
    )


def _estimate(trainer: Trainer, num_batches: int, card: Card | None) -> tuple[MemoryEstimate, str]:
    window = largest_window(trainer, num_batches)
    step, has_others = trainer_step(trainer, window), len(dict(modules_of(trainer))) > 1
    estimate = simulate_step(step, gpu=card).with_passes(len(window.batches) / step.num_micro_batches)
    prefix = f"{MODEL}." if has_others else ""  # other modules are not trained, and have no gradients
    unreached = tuple(name for name in estimate.unreached if name.startswith(prefix))
    assumptions = estimate.assumptions
    if not window.is_all:
        assumptions += (f"no batch is larger than the largest of the first {window.num_seen} of the data",)
    confidence = "low" if unreached else "medium" if assumptions else "high"
    found = replace(estimate, unreached=unreached, assumptions=assumptions, confidence=confidence)
    return found, str(window)


def _plans(trainer: Trainer) -> bool:
    offloaders = [offloader_of(callback) for callback in trainer.callback_handler.callbacks]
    return any(offloader is not None and offloader.mode == "auto" for offloader in offloaders)


def _refuse(trainer: Trainer) -> None:
    args = trainer.args
    unknown = {
        f"world_size={args.world_size}": args.world_size > 1,
        f"n_gpu={args.n_gpu}": args.n_gpu > 1,
        f"fsdp={args.fsdp!r}": bool(args.fsdp),
        f"deepspeed={args.deepspeed!r}": bool(args.deepspeed),
        "use_liger_kernel=True": args.use_liger_kernel,
        "activation_offloading=True": getattr(args, "activation_offloading", False),
        "precompute_ref_log_probs=True": getattr(args, "precompute_ref_log_probs", False),
        "a base that streams": streamed_weights_of(trainer.model) is not None,
        f"generation ({type(trainer).__name__})": hasattr(trainer, "generation_config") and not generates(trainer),
    }
    for name, is_on in unknown.items():
        if is_on:
            raise ValueError(f"{name} is not simulated; estimate a trainer without it, in one process")
    for name, parameter in trainer.model.named_parameters():
        kind = type(parameter if type(parameter) is not nn.Parameter else parameter.data)
        if kind is not Tensor:
            raise ValueError(
                f"{name} is a {kind.__name__}, and weights of such types are not simulated; for a model in 4 or 8 bits "
                "use hf-memopt estimate --quantize"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{name} is on {parameter.device}; make the trainer with use_cpu=True, since a forked process cannot "
                "reach the device"
            )
