"""Adapters of PEFT, and TRL's output layer, on a model that is simulated."""

from typing import Any

from torch import nn

from hf_memopt.estimate.simulation.quantised.quantised_base import adapt_as_peft_does

ALL_LINEAR = "all-linear"


def import_peft(lora_rank: int) -> Any:
    """Return PEFT; import it before processes are forked, since it takes a while.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ValueError(f"lora_rank={lora_rank} needs PEFT: pip install peft") from error
    return peft


def import_fused_head() -> Any:
    """Return TRL's `add_fused_lm_head`; import it before processes are forked, since it takes a while.

    Raises:
        ValueError: TRL is not installed, or is older than that function.
    """
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise ValueError("loss='chunked' needs TRL: pip install 'trl>=1.16'") from error
    return add_fused_lm_head


def with_adapters(model: nn.Module, rank: int, targets: str, use_dora: bool, peft_type: str | None) -> nn.Module:
    """Freeze a transformers model and add LoRA adapters.

    Args:
        model: changed in place.
        rank: of the adapters.
        targets: names of layers, such as "q_proj,v_proj"; "all-linear", all but the output's.
        use_dora: with a magnitude for each of a layer's outputs (DoRA).
        peft_type: PEFT's name of a task whose head is trained too; None, nothing else is.

    Raises:
        ValueError: the model has no such layers.
    """
    peft = import_peft(rank)
    names = targets if targets == ALL_LINEAR else targets.split(",")
    try:
        config = peft.LoraConfig(r=rank, target_modules=names, use_dora=use_dora, task_type=peft_type)
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora_targets={targets!r}: PEFT finds no such layers in the model: {error}") from error
    adapt_as_peft_does(adapted)
    return adapted
