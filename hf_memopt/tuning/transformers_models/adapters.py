"""Adapters of PEFT on a model that is simulated."""

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


def with_adapters(model: nn.Module, rank: int, targets: str, use_dora: bool) -> nn.Module:
    """Freeze a transformers model and add LoRA adapters.

    Args:
        model: changed in place.
        rank: of the adapters.
        targets: names of layers, such as "q_proj,v_proj"; "all-linear", all but the output's.
        use_dora: with a magnitude for each of a layer's outputs (DoRA).

    Raises:
        ValueError: the model has no such layers.
    """
    peft = import_peft(rank)
    names = targets if targets == ALL_LINEAR else targets.split(",")
    try:
        config = peft.LoraConfig(r=rank, target_modules=names, use_dora=use_dora)
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora_targets={targets!r}: PEFT finds no such layers in the model: {error}") from error
    adapt_as_peft_does(adapted)
    return adapted
