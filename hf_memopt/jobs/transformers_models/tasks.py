"""Tasks that a transformers model is trained for: the class of the model, and the batch that it takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
)

from hf_memopt.jobs.diffusers_models.denoising import Denoising
from hf_memopt.jobs.transformers_models.adapters import ALL_LINEAR
from hf_memopt.jobs.transformers_models.image_text.image_text_batch import describe_images, image_text_batch
from hf_memopt.jobs.transformers_models.model_batches import (
    Sample,
    image_batch,
    sequence_batch,
    spectrogram_batch,
    token_batch,
    waveform_batch,
)
from hf_memopt.jobs.transformers_models.model_config import building

OF_IMAGES = ("images_per_sample", "image_size", "freeze_vision_tower")


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        auto: transformers' class that finds the model's.
        batch: called with a configuration, the number of samples, and the sizes of each of them.
        positions: the configuration's name of the most tokens that a sample may have; None, it has no limit.
        has_mask: batches may have an attention mask that hides padding.
        image_options: those of `ModelOptions` about images beside text; without any, samples have none.
        only: values of options, where there are fewer than in `CHOICES`.
        peft_type: PEFT's name of the task where adapters are trained beside a head.
    """

    auto: Any
    batch: Callable[[Any, int, Sample], dict[str, Tensor]] = token_batch
    positions: str | None = "max_position_embeddings"
    peft_type: str | None = None
    has_mask: bool = True
    image_options: tuple[str, ...] = ()
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def has_equal_layers(self) -> bool:
        """Return whether a configuration with fewer layers can be made: not for several models in one."""
        return not self.image_options

    def describe(self, config: Any, sample: Sample) -> str:
        """Return the assumptions on images beside text."""
        return describe_images(config, sample) if self.image_options else ""

    def lora_targets(self, config: Any) -> str:
        return ALL_LINEAR

    def checkpoint(self, model: Any) -> None:
        checkpoint_layers(model)

    def loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss

    def class_name(self, config: Any) -> str | None:
        if type(config) not in self.auto._model_mapping:
            return None
        found = self.auto._model_mapping[type(config)]
        return str((found[0] if isinstance(found, tuple) else found).__name__)

    def build(self, config: Any, source: str, **options: Any) -> nn.Module:
        with building(source):
            model: nn.Module = self.auto.from_config(config, trust_remote_code=False, **options)
        return model


# The most specific first: encoder-decoders and encoders are in the causal list too, for their decoder mode.
TASKS: dict[str, Task | Denoising] = {
    "seq2seq": Task(AutoModelForSeq2SeqLM),
    "speech-seq2seq": Task(
        AutoModelForSpeechSeq2Seq, spectrogram_batch, positions="max_target_positions", has_mask=False
    ),
    "masked": Task(AutoModelForMaskedLM),
    "image-text-to-text": Task(AutoModelForImageTextToText, image_text_batch, image_options=OF_IMAGES),
    "causal": Task(AutoModelForCausalLM),
    "image-classification": Task(AutoModelForImageClassification, image_batch, positions=None, has_mask=False),
    "sequence-classification": Task(AutoModelForSequenceClassification, sequence_batch, peft_type="SEQ_CLS"),
    "token-classification": Task(AutoModelForTokenClassification, peft_type="TOKEN_CLS"),
    "ctc": Task(AutoModelForCTC, waveform_batch, positions=None, has_mask=False),
    "denoising": Denoising(),
}


def task_of(config: Any, wanted: str, source: str) -> str:
    possible = {name: found for name, task in TASKS.items() if (found := task.class_name(config)) is not None}
    if wanted != "auto" and wanted in possible:
        return wanted
    if not possible or wanted != "auto":
        tried = "any task of " + ", ".join(TASKS) if wanted == "auto" else f"task={wanted!r}"
        raise ValueError(
            f"{source}: transformers has no class of model_type={config.model_type!r} for {tried}; write setup and "
            "step yourself and call hf_memopt.estimate_peak_memory"
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


def checkpoint_layers(model: Any) -> None:
    """Use the method that the installed transformers prefers."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
