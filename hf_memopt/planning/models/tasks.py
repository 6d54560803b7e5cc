"""Tasks that a transformers model is trained for: the class of the model, and the batch that it takes."""

import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from hf_memopt.planning.models.adapters import ALL_LINEAR
from hf_memopt.planning.models.contrastive import column_batch, describe_columns, embeds_texts, ranking_loss
from hf_memopt.planning.models.denoising import Denoising
from hf_memopt.planning.models.model_batches import (
    OWN_STEP,
    Sample,
    describe_images,
    image_batch,
    image_text_batch,
    sequence_batch,
    spectrogram_batch,
    token_batch,
    waveform_batch,
)
from hf_memopt.planning.models.quiet import building
from hf_memopt.planning.simulation.patched_transformers import no_hub_kernels

CONTRASTIVE = "contrastive"
# It stands above this package.
_EMBEDDING_SCRIPT = "hf_memopt.integrations.sentence_transformers.train"
OF_IMAGES = ("images_per_sample", "image_size", "freeze_vision_tower")


@dataclass(frozen=True)
class Task:
    auto: Any  # transformers' class that finds the model's
    # Called with a configuration, the number of samples, and the sizes of each of them.
    batch: Callable[[Any, int, Sample], dict[str, Tensor]] = token_batch
    positions: str | None = "max_position_embeddings"  # the configuration's name of a sample's most tokens, if limited
    peft_type: str | None = None  # PEFT's name of the task where adapters are trained beside a head
    has_mask: bool = True  # batches may have an attention mask that hides padding
    has_own_loss: bool = False  # the model's output has no loss; `loss` computes it
    image_options: tuple[str, ...] = ()  # of `ModelOptions`, about images beside text; without any, samples have none
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # values, where fewer than in `CHOICES`

    def describe(self, config: Any, sample: Sample) -> str:
        """Return the assumptions on images beside text."""
        return describe_images(config, sample) if self.image_options else ""

    def lora_targets(self, config: Any) -> str:
        return ALL_LINEAR

    def checkpoint(self, model: Any, use_reentrant: bool = False) -> None:
        checkpoint_layers(model, use_reentrant)

    def loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor | None = getattr(model(**inputs), "loss", None)
        if loss is None:
            raise ValueError(f"the model makes no loss from labels alone; {OWN_STEP}")
        return loss

    def quantises(self, model: nn.Module) -> None:
        """Return nothing: transformers decides which linear layers it quantises."""

    def script(self, chosen: Mapping[str, Any], config: Any) -> str:
        """Return the script that trains with a plan's choice, with flags; `train.py` is one's own."""
        return f"train.py {_as_flags(chosen['flags'])}"

    def write_files(self, chosen: Mapping[str, Any], config: Any, folder: Path) -> dict[str, str]:
        """Write nothing: flags of TrainingArguments name no files."""
        return {}

    def class_name(self, config: Any) -> str | None:
        return None if type(config) not in self.auto._model_mapping else str(self._class(config).__name__)

    def build(self, config: Any, source: str, **options: Any) -> nn.Module:
        with building(source), no_hub_kernels():
            found = self._class(config)
            # As `from_pretrained` does where the class is one for text alone.
            is_for_text = found.config_class is config.sub_configs.get("text_config")
            model: nn.Module = found._from_config(config.get_text_config() if is_for_text else config, **options)
        return model

    def _class(self, config: Any) -> Any:
        """Return transformers' class: of several that which the configuration names, or the first."""
        found = self.auto._model_mapping[type(config)]
        several = found if isinstance(found, tuple) else (found,)
        return next((each for each in several if each.__name__ in (config.architectures or ())), several[0])


class Contrastive(Task):
    """The task of models that embed texts, without a head."""

    def class_name(self, config: Any) -> str | None:
        if not embeds_texts(config) or type(config) not in self.auto._model_mapping:
            return None
        takes_tokens = "input_ids" in inspect.signature(self._class(config).forward).parameters
        return super().class_name(config) if takes_tokens else None

    def describe(self, config: Any, sample: Sample) -> str:
        return describe_columns(config, sample)

    def build(self, config: Any, source: str, **options: Any) -> nn.Module:
        """Return the model without the layer that BERT makes a class with, and that learns nothing here."""
        model: Any = super().build(config, source, **options)
        if getattr(model, "pooler", None) is not None:
            model.pooler = nn.Identity()
        return model  # type: ignore[no-any-return]

    def loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return ranking_loss(model, inputs)

    def script(self, chosen: Mapping[str, Any], config: Any) -> str:
        """Return the script for sentence-transformers, unless it lacks an option."""
        is_plain = (chosen["quantize"], chosen["use_dora"]) == ("none", False)
        if not is_plain or chosen["optimizer_on"] != "device":
            return super().script(chosen, config)
        about = {"model": shlex.quote(chosen["model"]), "passages": chosen["passages"], "max_length": chosen["seq_len"]}
        about |= {name: chosen[name] for name in ("dtype", "attention")}
        flags = chosen["flags"]
        if chosen["gradient_cache"]:
            about["micro_batch_size"] = chosen["micro_batch"]
            whole = chosen["micro_batch"] * chosen["gradient_accumulation_steps"]
            flags = {**flags, "per_device_train_batch_size": whole, "gradient_accumulation_steps": 1}
        if chosen["lora_rank"] is not None:
            about |= {name: chosen[name] for name in ("lora_rank", "lora_targets")}
        own = " ".join(f"--{name} {value}" for name, value in about.items())
        return f"-m {_EMBEDDING_SCRIPT} {own} {_as_flags(flags)}"


# The most specific first: encoder-decoders and encoders are in the causal list too, for their decoder mode.
TASKS: dict[str, Task | Denoising] = {
    "seq2seq": Task(transformers.AutoModelForSeq2SeqLM),
    "speech-seq2seq": Task(
        transformers.AutoModelForSpeechSeq2Seq, spectrogram_batch, positions="max_target_positions", has_mask=False
    ),
    "masked": Task(transformers.AutoModelForMaskedLM),
    "image-text-to-text": Task(transformers.AutoModelForImageTextToText, image_text_batch, image_options=OF_IMAGES),
    "causal": Task(transformers.AutoModelForCausalLM),
    "image-classification": Task(
        transformers.AutoModelForImageClassification, image_batch, positions=None, has_mask=False
    ),
    "sequence-classification": Task(
        transformers.AutoModelForSequenceClassification, sequence_batch, peft_type="SEQ_CLS"
    ),
    "token-classification": Task(transformers.AutoModelForTokenClassification, peft_type="TOKEN_CLS"),
    "ctc": Task(transformers.AutoModelForCTC, waveform_batch, positions=None, has_mask=False),
    CONTRASTIVE: Contrastive(transformers.AutoModel, column_batch, has_own_loss=True, only={"loss": ("full",)}),
    "denoising": Denoising(),
}


def task_of(config: Any, wanted: str, source: str) -> str:
    possible = {name: found for name, task in TASKS.items() if (found := task.class_name(config)) is not None}
    if wanted in possible:
        return wanted
    if not possible:
        raise ValueError(
            f"{source}: transformers has no class of model_type={config.model_type!r} for any task of "
            f"{', '.join(TASKS)}; {OWN_STEP}"
        )
    if wanted != "auto":
        raise ValueError(
            f"{source}: transformers has no class of model_type={config.model_type!r} for task={wanted!r}; it has some "
            f"for {', '.join(possible)}"
        )
    named = config.architectures or list(possible.values())
    for name, class_name in possible.items():
        if class_name in named:
            return name
    known = ", ".join(f"task={name!r} for {class_name}" for name, class_name in possible.items())
    raise ValueError(
        f"{source}: its configuration is of {named[0]}, whose task is not simulated; name another one if that is "
        f"meant: {known}"
    )


def _as_flags(fields: Mapping[str, Any]) -> str:
    texts = (shlex.quote(json.dumps(each)) if isinstance(each, dict) else str(each) for each in fields.values())
    return " ".join(f"--{name} {text}" for name, text in zip(fields, texts, strict=True))


def checkpoint_layers(model: Any, use_reentrant: bool = False) -> None:
    """Use the method that the installed transformers prefers; reentrant checkpoints want inputs with a gradient."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
