"""A transformers model and one update of it, as Accelerate runs it on the device that it finds."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import set_quantized_state

from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.activations.offloader import ActivationOffloader
from hf_memopt.estimate.simulation.quantised.quantised_base import adapters_kept_by_fsdp, quantise
from hf_memopt.jobs.accelerate_config import DDP, accelerator_for
from hf_memopt.jobs.diffusers_models.pipeline_encoders import PipelineEncoders
from hf_memopt.jobs.transformers_models.adapters import import_fused_head, with_adapters
from hf_memopt.jobs.transformers_models.contrastive import cached_ranking_loss
from hf_memopt.jobs.transformers_models.model_config import preparing, training
from hf_memopt.jobs.transformers_models.model_options import ModelOptions
from hf_memopt.jobs.transformers_models.optimizers import OPTIMIZERS, update_in_backward
from hf_memopt.jobs.workload import RESIDENT
from hf_memopt.weights.base import StreamedWeights
from hf_memopt.weights.optimizer import OffloadedOptimizer


class ModelUpdate:
    def __init__(
        self,
        options: ModelOptions,
        config: Any,
        checkpointing: str,
        offload: str,
        micro_batch: int,
        num_micro_batches: int,
    ) -> None:
        precision = "bf16" if options.precision == "fp16" and not options.sharing.is_zero else options.precision
        windows = 1 if options.gradient_cache else num_micro_batches
        self._accelerator = accelerator_for(options.sharing, precision, windows, micro_batch, options.max_grad_norm)
        device = self._accelerator.device
        with device if options.home == RESIDENT else torch.device("cpu"):
            model = build_model(options, config, checkpointing)
        self._streamed = None
        if options.home != RESIDENT:
            home: Any = options.home
            budget_gib, trained = options.base_budget_gib, options.trained
            self._streamed = StreamedWeights(model, home=home, trained=trained, budget_gib=budget_gib, device=device)
        with device:
            self._inputs: dict[str, Any] = options.batch(config, micro_batch)
            self._encoders = None
            if options.encoder_configs:
                self._encoders = PipelineEncoders(options.encoder_configs, config, micro_batch, options.sample)
        if options.loss == "chunked":
            self._inputs = {**self._inputs, "fused_lm_head": True}
        # fp16 without the scaler, which would need numbers. DeepSpeed has its own.
        self._accelerator.state._mixed_precision = options.precision
        with preparing(options.source, options.sharing):
            self._model, self._optimizer = self._prepare(model, options)
        self._accelerator.state._mixed_precision = precision
        self._task, self._source = options.kind_of_task, options.source
        self._cached: tuple[int, int] | None = None
        if options.gradient_cache:
            self._cached = options.effective_batch // micro_batch, num_micro_batches
        # Accelerate reads `sync_each_batch` where there are several processes; Trainer does so in one, too.
        self._unsynced = [] if options.sharing.offloads_by_fsdp else [self._model]
        self._max_grad_norm = options.max_grad_norm
        self._num_micro_batches = windows
        self._offloader = None
        if offload != "off":
            self._offloader = ActivationOffloader(mode=offload, offload_threshold_mb=options.offload_threshold_mb)

    def run(self) -> None:
        for _ in range(self._num_micro_batches):
            with self._accelerator.accumulate(*self._unsynced):
                with training(self._source):
                    self._accelerator.backward(self._loss())
                if self._accelerator.sync_gradients and self._max_grad_norm is not None:
                    self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
                if self._optimizer is not None:
                    self._optimizer.step()
                    self._optimizer.zero_grad()

    def _prepare(self, model: nn.Module, options: ModelOptions) -> tuple[Any, Any]:
        """Return model and optimizer; no optimizer where weights are updated in backward."""
        if options.optimizer_in_backward:
            update_in_backward(_trained(model), options.optimizer)
            return self._accelerator.prepare(model), None
        # Nothing else refers to the weights: engines replace them, and free the memory of each in turn.
        optimizer = OPTIMIZERS[options.optimizer](_trained(model))
        if options.optimizer_home != "off":
            home: Any = options.optimizer_home
            optimizer = OffloadedOptimizer(optimizer, home=home)
        if self._streamed is not None and options.trained:
            optimizer = self._streamed.adopt(optimizer)
        with adapters_kept_by_fsdp() if options.quantize != "none" else nullcontext():
            return self._accelerator.prepare(model, optimizer)  # type: ignore[no-any-return]

    def _loss(self) -> Tensor:
        if self._encoders is not None:
            self._encoders.run()
        saving = self._offloader.offload_context(self._model) if self._offloader else nullcontext()
        streaming = self._streamed.stream() if self._streamed else nullcontext()
        if self._cached is not None:
            return cached_ranking_loss(self._model, self._inputs, *self._cached)
        with saving, streaming:
            return self._task.loss(self._model, self._inputs)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_model(options: ModelOptions, config: Any, checkpointing: str) -> nn.Module:
    """Build from `config`, which is the options' or one with fewer layers."""
    task = options.kind_of_task
    dtype = getattr(torch, options.dtype)
    attention = None if options.attention == "auto" else options.attention
    # Quantised or sharded weights reach the device in their final form.
    place = nullcontext() if (options.quantize, options.engine) == ("none", DDP) else torch.device("cpu")
    with place, set_quantized_state() if options.quantize != "none" else nullcontext():
        model: Any = task.build(config, options.source, dtype=dtype, attn_implementation=attention)
    if isinstance(model.config, PretrainedConfig):
        model.config.use_cache = model.config.get_text_config().use_cache = False
        if getattr(model.config, "pad_token_id", 0) is None:
            model.config.pad_token_id = 0  # decoders that classify look for the last token that is none
    model.train()
    frozen = None
    if options.freeze_vision_tower:
        tower = model.get_encoder(modality="image").requires_grad_(False)
        frozen = next(name for name, module in model.named_modules() if module is tower)
    if options.quantize != "none":
        multiplied = getattr(torch, options.published.compute_dtype or options.dtype)
        quantise(
            model,
            options.quantize,
            multiplied,
            is_prepared=options.kbit_preparation == "peft",
            quantises=task.quantises(model),
            kept=options.published.kept,
            storage=getattr(torch, options.packed_in),
        )
    if options.loss == "chunked":
        import_fused_head()(model, outputs=("log_probs", "entropy", "is_top1"))  # the outputs that SFTTrainer requests
    if options.lora_rank is not None:
        targets = options.lora_targets or task.lora_targets(config)
        model = with_adapters(model, options.lora_rank, targets, options.use_dora, frozen, task.peft_type)
        if options.adapters_dtype is not None:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(options.adapters_dtype)
    if checkpointing in ("full", "reentrant"):
        task.checkpoint(model, use_reentrant=checkpointing == "reentrant")
    if checkpointing == "selective":
        apply_selective_checkpointing(model)
    return model  # type: ignore[no-any-return]
