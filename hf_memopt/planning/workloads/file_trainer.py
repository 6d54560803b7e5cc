"""The trainer of a run: of a model without memory, on samples that are all the same."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

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
    model, mark = build(), _STORED.get(options.quantize)
    given: dict[str, Any] = {"peft_config": adapters, "processing_class": _tokenizer()}
    if hasattr(arguments, "num_generations"):
        given |= {"reward_funcs": _no_reward}
    if mark is not None:
        # TRL asks these; later they would make transformers ask bitsandbytes.
        setattr(model, mark, True)
    # A trainer that generates on a server would ask the server when it is made.
    is_served = bool(getattr(arguments, "use_vllm", False))
    alone = patch.object(arguments, "use_vllm", False) if is_served else nullcontext()
    with alone, _reference_of(kind, build), _seen_by_trl(kind, options, arguments):
        trainer: Any = kind(model, args=arguments, train_dataset=Dataset.from_dict(data), **given)
    if is_served:
        trainer.use_vllm = True
    if mark is not None:
        delattr(model, mark)
    return trainer


@contextmanager
def _seen_by_trl(kind: Any, options: ModelOptions, arguments: Any) -> Iterator[None]:
    """Show TRL the plugin of DeepSpeed, by which it decides on adapters and checkpoints, but start no engine yet."""
    if not options.sharing.is_zero:
        yield
        return
    plugin = zero_plugin(options.sharing, 1, None)
    plain = kind.create_accelerator_and_postprocess

    def without_engine(trainer: Trainer) -> None:
        with patch.object(arguments, "deepspeed_plugin", None):
            plain(trainer)

    with (
        patch.object(arguments, "deepspeed_plugin", plugin),
        patch.object(kind, "create_accelerator_and_postprocess", without_engine),
    ):
        yield


def num_samples(arguments: Any) -> int:
    """Return the samples of the most passes that are simulated, or of one generation."""
    return int(arguments.per_device_train_batch_size * min(2, arguments.gradient_accumulation_steps))


@contextmanager
def _reference_of(kind: Any, build: Callable[[], Any]) -> Iterator[None]:
    """Build the reference model, if a trainer asks for one, where it would load the model's weights and move them."""
    made: list[Any] = []

    def create(path: str, **options: Any) -> Any:
        made.append(build().requires_grad_(False))
        made[-1].to = lambda *args, **options: made[-1]
        return made[-1]

    with patch.object(importlib.import_module(kind.__module__), "create_model_from_path", create, create=True):
        yield
    for model in made:
        del model.to


def _no_reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """Return a tokenizer with one word, and with the marks that TRL asks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({_PADDING: 0, END: 1, WORD: 2}, unk_token=_PADDING))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=_PADDING, eos_token=END)
