"""One update of a transformers model, as Accelerate runs it on the device that it finds."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.activations.offloader import ActivationOffloader
from hf_memopt.jobs.accelerate_config import accelerator_for, is_zero
from hf_memopt.jobs.transformers_models.model_building import build_model
from hf_memopt.jobs.transformers_models.model_options import ModelOptions
from hf_memopt.jobs.transformers_models.optimizers import OPTIMIZERS, update_in_backward
from hf_memopt.jobs.workload import RESIDENT
from hf_memopt.weights.base import StreamedWeights


class ModelUpdate:
    def __init__(
        self,
        options: ModelOptions,
        config: Any,
        checkpointing: str,
        offload: str,
        micro_batch: int,
        num_micro_batches: int,
        base: str = RESIDENT,
    ) -> None:
        precision = "bf16" if options.precision == "fp16" and not is_zero(options.engine) else options.precision
        self._accelerator = accelerator_for(
            precision, num_micro_batches, options.engine, micro_batch, options.max_grad_norm
        )
        device = self._accelerator.device
        with device if base == RESIDENT else torch.device("cpu"):
            model = build_model(options, config, checkpointing)
        self._streamed = None
        if base != RESIDENT:
            home: Any = base
            self._streamed = StreamedWeights(model, home=home, budget_gib=options.base_budget_gib, device=device)
        with device:
            self._inputs: dict[str, Any] = options.batch(config, micro_batch)
        if options.loss == "chunked":
            self._inputs = {**self._inputs, "fused_lm_head": True}
        # fp16 without the scaler, which would need numbers. DeepSpeed has its own.
        self._accelerator.state._mixed_precision = options.precision
        self._model, self._optimizer = self._prepare(model, options)
        self._accelerator.state._mixed_precision = precision
        self._task = options.kind_of_task
        self._max_grad_norm = options.max_grad_norm
        self._num_micro_batches = num_micro_batches
        self._offloader = None
        if offload != "off":
            self._offloader = ActivationOffloader(mode=offload, offload_threshold_mb=options.offload_threshold_mb)

    def run(self) -> None:
        for _ in range(self._num_micro_batches):
            with self._accelerator.accumulate(self._model):
                self._accelerator.backward(self._loss())
                if self._accelerator.sync_gradients and self._max_grad_norm is not None:
                    self._accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
                if self._optimizer is not None:
                    self._optimizer.step()
                    self._optimizer.zero_grad()

    def _prepare(self, model: nn.Module, options: ModelOptions) -> tuple[Any, Any]:
        """Return model and optimizer; no optimizer where weights are updated in backward."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if options.optimizer_in_backward:
            update_in_backward(parameters, options.optimizer)
            return self._accelerator.prepare(model), None
        return self._accelerator.prepare(model, OPTIMIZERS[options.optimizer](parameters))  # type: ignore[no-any-return]

    def _loss(self) -> Tensor:
        saving = self._offloader.offload_context(self._model) if self._offloader else nullcontext()
        streaming = self._streamed.stream() if self._streamed else nullcontext()
        with saving, streaming:
            return self._task.loss(self._model, self._inputs)
