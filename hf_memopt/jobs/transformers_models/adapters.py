"""Adapters of PEFT, and TRL's output layer, on a model that is simulated."""

import re
from typing import Any, NamedTuple

from torch import nn

from hf_memopt.estimate.simulation.quantised.quantised_base import adapt_as_peft_does
from hf_memopt.jobs.quiet import quiet

ALL_LINEAR = "all-linear"


class LoraTargets(NamedTuple):
    """The layers that have adapters.

    Attributes:
        names: names of layers, such as "q_proj,v_proj"; "all-linear", all but the output's.
        excluded: name of a module in which none has; None, there is no such module.
        peft_type: PEFT's name of a task whose head is trained too; None, nothing else is.
    """

    names: str
    excluded: str | None = None
    peft_type: str | None = None


def import_peft(lora_rank: int) -> Any:
    """Import PEFT, before processes are forked, since it takes a while."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ValueError(f"lora_rank={lora_rank} needs PEFT: pip install peft") from error
    return peft


def import_fused_head() -> Any:
    """Import TRL's function, before processes are forked, since it takes a while."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise ValueError("loss='chunked' needs TRL: pip install 'trl>=1.16'") from error
    return add_fused_lm_head


def with_adapters(model: nn.Module, rank: int, targets: LoraTargets, use_dora: bool) -> nn.Module:
    peft = import_peft(rank)
    names = targets.names if targets.names == ALL_LINEAR else targets.names.split(",")
    excluded = None if targets.excluded is None else rf"(.*\.)?{re.escape(targets.excluded)}\..*"
    try:
        config = peft.LoraConfig(
            r=rank, target_modules=names, exclude_modules=excluded, use_dora=use_dora, task_type=targets.peft_type
        )
        with quiet():
            adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora_targets={targets.names!r}: PEFT finds no such layers in the model: {error}") from error
    adapt_as_peft_does(adapted)
    return adapted
