"""lerobot's update of a policy on the device that Accelerate finds, from configurations alone."""

import copy
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate import Accelerator
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.policies import PreTrainedPolicy, get_policy_class
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from torch import Tensor
from torch.distributions import Distribution

from hf_memopt.activations.offloader import ActivationOffloader
from hf_memopt.activations.wrapped_module import hook_direct_calls
from hf_memopt.planning.models.model_config import read_config
from hf_memopt.planning.simulation.patched_lerobot import vlm_from_config

_METERS = ("loss", "grad_norm", "lr", "update_s", "dataloading_s")


class PolicyRun(NamedTuple):
    """The arguments of `update`, on the accelerator's device."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    batch: dict[str, Tensor]
    as_loaded: dict[str, Tensor]
    grad_clip_norm: float


def set_up(cfg: TrainPipelineConfig, precision: str, offload: str, num_tokens: int | None) -> PolicyRun:
    """Build a run as `lerobot-train` does, with a batch of zeros, and an offloader as of `hf-memopt launch`."""
    # fp16 takes as much memory as bf16, and its scaler would need numbers.
    precision = "bf16" if precision == "fp16" else precision
    accelerator = Accelerator(step_scheduler_with_optimizer=False, mixed_precision=precision)
    policy: Any = build_policy(cfg.policy).to(accelerator.device)
    if cfg.peft is not None:
        policy = policy.wrap_with_peft(peft_cli_overrides=vars(cfg.peft))
    optimizer, scheduler = make_optimizer_and_scheduler(cfg, policy)
    model, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)
    if offload != "off":
        ActivationOffloader(mode=offload).wrap(model)
        hook_direct_calls(model)
    # The loader holds a batch until the next one; the normaliser makes new tensors of those that it changes.
    as_loaded = batch_of(cfg.policy, cfg.batch_size, accelerator.device, num_tokens)
    batch = as_loaded | _normalised(as_loaded, cfg.policy)
    return PolicyRun(accelerator, model, optimizer, scheduler, batch, as_loaded, cfg.optimizer.grad_clip_norm)


def update(run: PolicyRun) -> None:
    metrics = MetricsTracker(1, 1, 1, {name: AverageMeter(name) for name in _METERS})
    accelerator, model, optimizer, scheduler, batch, _, grad_clip_norm = run
    # The arguments of distributions are valid, which only real numbers could show.
    with patch.object(Distribution, "_validate_args", False):
        update_policy(metrics, model, dict(batch), optimizer, grad_clip_norm, accelerator, lr_scheduler=scheduler)


def build_policy(config: PreTrainedConfig) -> PreTrainedPolicy:
    """Build a policy of random weights; of its VLM, the configuration alone is read."""
    config = copy.deepcopy(config)
    config.device = None  # where accelerate is
    if getattr(config, "pretrained_backbone_weights", None) is not None:
        config.pretrained_backbone_weights = None
    with vlm_from_config(read_config), redirect_stdout(StringIO()):
        return get_policy_class(config.type)(config)


def batch_of(
    config: PreTrainedConfig, size: int, device: torch.device, num_tokens: int | None = None
) -> dict[str, Tensor]:
    """Return zeros as lerobot's loader and tokenizer make a batch; None: instructions as long as they may be."""
    times = config.observation_delta_indices
    window = (size,) if times is None else (size, len(times))
    batch = {name: torch.zeros(*window, *each.shape, device=device) for name, each in config.input_features.items()}
    actions = (size,) if config.action_delta_indices is None else (size, len(config.action_delta_indices))
    batch[ACTION] = torch.zeros(*actions, *config.action_feature.shape, device=device)
    batch["action_is_pad"] = torch.zeros(*actions, dtype=torch.bool, device=device)
    longest = getattr(config, "tokenizer_max_length", None)
    if longest is not None:
        length = longest if num_tokens is None else num_tokens
        batch[OBS_LANGUAGE_TOKENS] = torch.zeros(size, length, dtype=torch.long, device=device)
        batch[OBS_LANGUAGE_ATTENTION_MASK] = torch.ones(size, length, dtype=torch.bool, device=device)
    return batch


def _normalised(raw: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    kinds = {name: each.type for name, each in config.input_features.items()} | {ACTION: FeatureType.ACTION}
    modes = {name: config.normalization_mapping.get(kind.value) for name, kind in kinds.items()}
    changed = [name for name, mode in modes.items() if mode not in (None, NormalizationMode.IDENTITY)]
    return {name: torch.zeros_like(raw[name]) for name in changed}
