"""The trainer of a run: of a model without memory, on samples that are all the same."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Trainer
from transformers.modeling_utils import set_quantized_state

from hf_memopt.planning.models.accelerate_config import zero_plugin
from hf_memopt.planning.models.adapters import cast_trained, freeze_first_layers, lora_config, with_adapters
from hf_memopt.planning.models.contrastive import cached_ranking_loss
from hf_memopt.planning.models.model_options import ModelOptions
from hf_memopt.planning.models.pipelines import PipelineEncoders
from hf_memopt.planning.models.quiet import quiet, refused_by
from hf_memopt.planning.simulation.patched_trl import marked, plugin_without_engine, reference_built_by, without_server
from hf_memopt.planning.simulation.quantised.block_wise_adamw import BlockWiseAdamW
from hf_memopt.planning.simulation.quantised.quantised_base import adapt_as_peft_does, quantise
from hf_memopt.planning.workloads.argument_file import ArgumentFile
from hf_memopt.planning.workloads.trl_trainers import END, WORD, Rows

_PADDING = "<pad>"
# transformers' marks of models that are stored in few bits.
_STORED = {"nf4": "is_loaded_in_4bit", "nf4-double": "is_loaded_in_4bit", "nf4-experts": "is_loaded_in_4bit"}
_STORED |= {"int8-llm": "is_loaded_in_8bit"}
# Optimizers of bitsandbytes, which has no kernels for tensors without memory.
_BLOCK_WISE = {
    "adamw-8bit-bnb": {"bits": 8, "is_paged": False},
    "paged-adamw-8bit": {"bits": 8, "is_paged": True},
    "paged-adamw-32bit": {"bits": 32, "is_paged": True},
}


@quiet()
def make_trainer(
    file: ArgumentFile, changes: Mapping[str, Any], options: ModelOptions, config: Any, output_dir: str
) -> Trainer:
    """Make the trainer of a file with changes; its model is of `config`, which may have fewer layers than asked for."""
    kind, arguments = file.trainer, file.training_arguments(changes, output_dir)
    build = partial(build_model, options, config)
    with refused_by(file.trainer_name):
        if kind is None:
            about = file.model_fields({"lora_dropout": 0.0, **file.given, **changes})
            trainer: Trainer = OwnLoss(options, config, build(), arguments, about)
        else:
            adapters = None if options.lora_rank is None else lora_config(file.model_fields(changes))
            rows = kind.rows(arguments, options.seq_len, num_samples(arguments))
            if options.padding:  # of every other sample
                rows = {name: [row[number % 2 :] for number, row in enumerate(held)] for name, held in rows.items()}
            trainer = _trl_trainer(kind.kind, build, options, arguments, rows, adapters)
    adapt_as_peft_does(trainer.model)
    if options.adapters_dtype != "auto":
        cast_trained(trainer.model, getattr(torch, options.adapters_dtype))
    if options.optimizer in _BLOCK_WISE:
        settings = _BLOCK_WISE[options.optimizer]
        trainer.get_optimizer_cls_and_kwargs = lambda *args: (BlockWiseAdamW, dict(settings))
    return trainer


def build_model(options: ModelOptions, config: Any, device: str = "meta") -> Any:
    """Return the model without adapters; it is quantised as the options say."""
    task, is_quantised = options.kind_of_task, options.quantize != "none"
    config = copy.deepcopy(config)  # a trainer writes into its model's configuration
    attention = None if options.attention == "auto" else options.attention
    with torch.device(device), set_quantized_state() if is_quantised else nullcontext():
        model: Any = task.build(
            config, options.source, dtype=getattr(torch, options.dtype), attn_implementation=attention
        )
    if isinstance(model.config, PretrainedConfig):
        model.config.use_cache = model.config.get_text_config().use_cache = False
        if getattr(model.config, "pad_token_id", 0) is None:
            model.config.pad_token_id = 0  # decoders that classify look for the last token that is none
    if options.freeze_vision_tower:
        model.get_encoder(modality="image").requires_grad_(False)
    if options.freeze_layers is not None:
        freeze_first_layers(model, options.freeze_layers)
    if is_quantised:
        quantise(
            model,
            options.quantize,
            getattr(torch, options.published.compute_dtype or options.dtype),
            is_prepared=options.kbit_preparation == "peft",
            quantises=task.quantises(model),
            kept=options.published.kept,
            storage=getattr(torch, options.packed_in),
        )
    return model


def adapted(options: ModelOptions, config: Any, model: Any, about: Mapping[str, Any]) -> Any:
    """Return a model of any task with the adapters that the options, and fields of TRL's ModelConfig, ask for."""
    if options.lora_rank is None:
        return model
    task, tower = options.kind_of_task, None
    if options.freeze_vision_tower:
        tower = model.get_encoder(modality="image")
    frozen = next((name for name, module in model.named_modules() if module is tower), None)
    targets = options.lora_targets or task.lora_targets(config)
    more = {name: about[name] for name in ("lora_dropout", "use_rslora", "use_dora")}
    more["modules_to_save"] = about["lora_modules_to_save"]
    model = with_adapters(model, options.lora_rank, targets, frozen, task.peft_type, **more)
    if options.usual_adapters_dtype is not None:
        cast_trained(model, options.usual_adapters_dtype)
    return model


class OwnLoss(Trainer):  # type: ignore[misc]
    """Trains a model of any task on one batch, with the loss of its task."""

    def __init__(
        self, options: ModelOptions, config: Any, model: Any, arguments: Any, about: Mapping[str, Any]
    ) -> None:
        self._options, self._config = options, config
        self._encoders: PipelineEncoders | None = None
        model = adapted(options, config, model, about)
        if options.checkpointing in ("full", "reentrant"):
            options.kind_of_task.checkpoint(model, use_reentrant=options.checkpointing == "reentrant")
            arguments.gradient_checkpointing = False  # it is on
        super().__init__(model, arguments)

    def enter(self, device: torch.device) -> None:
        options = self._options
        if options.encoder_configs:
            with device:
                count = self.args.per_device_train_batch_size
                self._encoders = PipelineEncoders(options.encoder_configs, self._config, count, options.sample)

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Tensor:
        options = self._options
        if self._encoders is not None:
            self._encoders.run()
        if options.gradient_cache:
            num_parts = options.effective_batch // options.micro_batch
            return cached_ranking_loss(model, inputs, num_parts, min(2, num_parts))
        if options.kind_of_task.has_own_loss:
            return options.kind_of_task.loss(model, inputs)
        loss: Tensor = super().compute_loss(model, inputs, *others, **more)
        return loss


def _trl_trainer(
    kind: Any, build: Callable[[], Any], options: ModelOptions, arguments: Any, data: Rows, adapters: Any
) -> Trainer:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    model, sharing = build(), options.sharing
    given: dict[str, Any] = {"peft_config": adapters, "processing_class": _tokenizer()}
    if hasattr(arguments, "num_generations"):
        given |= {"reward_funcs": _no_reward}
    plugin = zero_plugin(sharing, 1, None) if sharing.is_zero else None
    with (
        without_server(arguments),
        reference_built_by(kind, build),
        plugin_without_engine(kind, arguments, plugin),
        marked(model, _STORED.get(options.quantize)),
    ):
        trainer: Any = kind(model, args=arguments, train_dataset=Dataset.from_dict(data), **given)
    if getattr(arguments, "use_vllm", False):
        trainer.use_vllm = True
    return trainer


def num_samples(arguments: Any) -> int:
    """Return the samples of the most passes that are simulated, or of one generation."""
    return int(arguments.per_device_train_batch_size * min(2, arguments.gradient_accumulation_steps))


def _no_reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """Return a tokenizer with one word, and with the marks that TRL asks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({_PADDING: 0, END: 1, WORD: 2}, unk_token=_PADDING))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=_PADDING, eos_token=END)
