"""The fields that the flags of `hf-memopt estimate` and `plan`, a file, and Python share.

It imports no torch, so that `--help` and a misspelt flag take no time.
"""

import difflib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from hf_memopt.command_line import flag
from hf_memopt.ranges import COUNT, POSITIVE, Range, ranges_in
from hf_memopt.text_files import read_values

# The default first.
CHOICES: dict[str, tuple[str, ...]] = {
    "task": (
        "auto",
        "seq2seq",
        "speech-seq2seq",
        "masked",
        "image-text-to-text",
        "causal",
        "image-classification",
        "sequence-classification",
        "token-classification",
        "ctc",
        "contrastive",
        "denoising",
    ),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantize": ("auto", "none", "nf4", "nf4-double", "nf4-experts", "int8-llm", "int8-torchao"),
    "kbit_preparation": ("trl", "none", "peft"),
    "precision": ("no", "bf16", "fp16"),
    "attention": ("auto", "sdpa", "eager"),
    "loss": ("full", "chunked"),
    "optimizer": (
        "adamw",
        "adamw-foreach",
        "sgd",
        "adamw-8bit",
        "adamw-4bit",
        "adamw-8bit-bnb",
        "paged-adamw-8bit",
        "paged-adamw-32bit",
        "adafactor",
    ),
    "optimizer_home": ("off", "host", "file"),
    "optimizer_on": ("device", "host", "nvme"),
    "weights_on": ("device", "host", "nvme"),
    "encoders": ("off", "vae", "device"),
    "engine": ("ddp", "fsdp2", "fsdp2-no-reshard", "zero2", "zero3"),
    "base": ("off", "host", "file"),
    "checkpointing": ("none", "selective", "full", "reentrant"),
    "offload": ("off", "auto", "inputs", "all"),
}
DEFAULTS: dict[str, Any] = {name: values[0] for name, values in CHOICES.items() if name != "loss"} | {
    "seq_len": 2048,
    "images_per_sample": 1,
    "passages": 1,
    "max_grad_norm": 1.0,
    "num_gpus": 1,
}
NOT_CLIPPED = "none"
# Spellings that still work, and those that took their place.
_OLD = {"quantize": {"int8": "int8-llm"}, "base": {"resident": "off"}}
# transformers' own, of any model.
PLAIN_TRAINER = "trainer"
TRAINERS = (PLAIN_TRAINER, "sft", "dpo", "kto", "orpo", "reward", "grpo")
_CARD = (
    "a card (a100-80gb, 4090, ...), a size as cards are sold (24GB) or exactly (8GiB), or a size with a card's speed "
    "(48GB@l40s)"
)

Text = str | None
File = Path | None
Count = Annotated[int | None, COUNT]


def unsaid(text: str, **options: Any) -> Any:
    """Return a field that is None unless it is said, with its help text and `add_argument` options."""
    return flag(None, text, **options)


@dataclass(frozen=True)
class JobSpec:
    """A training run, the card for it, and the answers that are asked for. Each field's help is its documentation.

    A field that is None, False or empty is not said: it is left to `DEFAULTS`, to the file of `training_args`, or to
    the recipe's configuration. transformers' `HfArgumentParser` reads the class, too; the command has a reader of its
    own (`commands.spec_flags`), since importing transformers takes more than a second.

    Raises:
        ValueError: a value is none of its field's; names the field, the value and what it takes.
    """

    model: Text = unsaid(
        "hub id, folder or config.json of a transformers model or a robot policy, or lerobot's train_config.json",
        metavar="MODEL",
    )
    training_args: File = unsaid(
        "YAML or JSON with fields of TrainingArguments, or of TRL's SFTConfig and ModelConfig: train as the file "
        "says; other flags override it",
        metavar="FILE",
    )
    trainer: Text = unsaid(
        "train MODEL, or as --training-args says, with transformers' trainer or this one of TRL, and the defaults of "
        "its settings (default: sft for a language model, trainer for others)",
        choices=TRAINERS,
    )
    recipe: Text = unsaid("instead of MODEL: a recipe (default: the one that --config is named after)", metavar="NAME")
    config: File = unsaid("the recipe's configuration file", metavar="FILE")
    set: list[str] = flag(
        [],
        "one of the recipe's levers, or for a robot policy a flag of lerobot-train, such as "
        "policy.train_expert_only=false; may be repeated",
        metavar="NAME=VALUE",
    )
    gpu: Text = unsaid(f"the card to fit: {_CARD}")
    host: Text = unsaid(
        "host memory that may be used, such as 32GiB, or 32GiB@40GBps with its speed in updates (default: any)"
    )
    disk: Text = unsaid(
        "disk that takes what --host has no room for, with its speed in each direction, such as 500GiB@5GBps "
        "(default: none; without a speed, 2GBps is assumed)",
    )
    reserve: Text = unsaid("device memory that other programs take, such as 1GiB for a desktop (default: none)")
    link: Text = unsaid("bandwidth between host and device, such as 12GBps (default: the card's)")
    batch_size: Count = unsaid("samples per forward pass")
    accumulation: Count = unsaid("forward passes per update (default: 1, or the recipe's)")
    effective_batch: Count = unsaid("samples per update (default: the configuration's)")
    task: Text = unsaid(
        "what the model learns; auto: by the class that the configuration names", choices=CHOICES["task"]
    )
    dtype: Text = unsaid("of the weights; auto: as the configuration says", choices=CHOICES["dtype"])
    quantize: Text = unsaid(
        "frozen weights in 4 or 8 bits by bitsandbytes, or in 8 by torchao; nf4-double: with nested quantisation; "
        "nf4-experts: those of a mixture too, as unsloth and bitsandbytes' Experts4bit store them; with --lora-rank; "
        "auto: as the checkpoint was published",
        choices=CHOICES["quantize"],
    )
    kbit_preparation: Text = unsaid(
        "weights that bitsandbytes does not quantise: trl and none: they stay in dtype; peft: in float32, as "
        "prepare_model_for_kbit_training makes them. Adapters are in bfloat16 with trl, else in float32",
        choices=CHOICES["kbit_preparation"],
    )
    precision: Text = unsaid(
        "accelerate's autocast; a recipe has its own, or tries both with auto",
        choices=(*CHOICES["precision"], "auto"),
    )
    attention: Text = unsaid("auto: transformers' choice", choices=CHOICES["attention"])
    loss: Text = unsaid(
        "chunked: from the logits of a tile of tokens at a time, as TRL's SFTTrainer has it; full: from those of all, "
        "as transformers' Trainer has it (default: the trainer's)",
        choices=CHOICES["loss"],
    )
    optimizer: Text = unsaid(
        "torch's fused AdamW, torch's default one, SGD without momentum, torchao's AdamW in few bits, bitsandbytes', "
        "or Adafactor",
        choices=CHOICES["optimizer"],
    )
    optimizer_home: Text = unsaid(
        "where the optimizer's state lives between its visits to the device (OffloadedOptimizer); off: it stays there",
        choices=CHOICES["optimizer_home"],
    )
    optimizer_on: Text = unsaid(
        "where the engine keeps and updates the optimizer's state: fsdp2, zero2 and zero3 on the host, zero3 on nvme",
        choices=CHOICES["optimizer_on"],
    )
    weights_on: Text = unsaid(
        "where trained weights live between their uses: with zero3; fsdp2 moves them with the optimizer",
        choices=CHOICES["weights_on"],
    )
    engine: Text = unsaid(
        "how GPUs share the run, one GPU too; zero2 and zero3 need DeepSpeed", choices=CHOICES["engine"]
    )
    seq_len: Count = unsaid("tokens per sample, image tokens included, or frames of sound")
    lora_rank: Count = unsaid("train adapters of this rank and freeze the rest (default: none)")
    lora_targets: Text = unsaid(
        "layers that get adapters, such as q_proj,v_proj (default: all-linear; for a denoiser, the layers that "
        "diffusers' scripts adapt)",
    )
    images_per_sample: Count = unsaid("images beside the text of a vision-language model")
    image_size: Text = unsaid(
        "size of these images after the model's processor, or of those that a denoiser learns (default: the "
        "configuration's, if it has one)",
        metavar="H[xW]",
    )
    text_tokens: Count = unsaid(
        "text tokens of a denoiser's longest encoder (default: as many as diffusers' script has)"
    )
    num_frames: Count = unsaid("frames of the videos that a denoiser learns (default: the configuration's)")
    encoders: Text = unsaid(
        "of a denoiser's pipeline, on the device and in each step: vae: the VAE; device: text encoders too; off: "
        "latents and embeddings were computed before",
        choices=CHOICES["encoders"],
    )
    freeze_vision_tower: bool = flag(False, "do not train the vision tower, and give it no adapters")
    passages: Count = unsaid("texts for each query of a contrastive task: one that answers it, and negatives")
    gradient_cache: bool = flag(
        False,
        "the loss of a contrastive task sees the whole update, of which --batch-size texts run at a time (CachedLoss)",
    )
    base: Text = unsaid(
        "where frozen weights live between their visits to the device (StreamedWeights); plan tries all, file with "
        "--disk alone",
        choices=CHOICES["base"],
    )
    base_budget: Text = unsaid(
        "device memory for frozen weights, such as 3GiB, whose rest beside the visits keeps some there"
    )
    trained: bool = flag(
        False, "weights that train have the home of --base, too, with their gradients and the optimizer's state"
    )
    padding: bool = flag(False, "give batches an attention mask, as if some samples were shorter")
    use_dora: bool = flag(False, "adapters with a magnitude for each output (DoRA)")
    max_grad_norm: Annotated[float | str | None, POSITIVE] = unsaid("clip gradients to this norm; none: do not clip")
    num_gpus: Count = unsaid("GPUs, with one process each; all figures are for one GPU")
    checkpointing: Text = unsaid(
        "of activations; reentrant: torch's older kind, of all layers", choices=CHOICES["checkpointing"]
    )
    offload: Text = unsaid("of activations", choices=CHOICES["offload"])
    check: bool = flag(False, "exit status 1 if it does not fit on --gpu")
    explain: bool = flag(False, "say why each lever is used or not")
    json: File = unsaid("also write everything as JSON", metavar="FILE")
    timeline: File = unsaid("also draw memory over the step, by kind", metavar="FILE.html")
    snapshot: File = unsaid(
        "also write a memory snapshot, which https://pytorch.org/memory_viz opens like that of a real run",
        metavar="FILE.pickle",
    )
    output: File = unsaid("folder for the chosen configuration and an accelerate config (default: plans/NAME)")
    vary: Text = unsaid(
        "levers beside activations and micro-batch: some of optimizer, loss, base, precision and quantize, such as "
        "optimizer,loss (default: the base of adapters)",
        metavar="LEVERS",
    )
    workers: Count = unsaid("simulations at once (default: one per core)")

    def __post_init__(self) -> None:
        for name, value in self.said().items():
            object.__setattr__(self, name, FIELDS[name].read(value))

    def said(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if not (value is None or value is False or value == [])
        }

    @property
    def is_of_recipe(self) -> bool:
        """Return whether a recipe trains, rather than the trainer of a file or a model."""
        return not self.is_of_trainer and (self.recipe or self.config) is not None

    @property
    def is_of_trainer(self) -> bool:
        """Return whether a trainer of TRL or transformers trains, by the fields of its settings."""
        return self.training_args is not None or self.trainer is not None


@dataclass(frozen=True)
class SpecField:
    name: str
    kind: type
    allowed: Range | None
    options: dict[str, Any]

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def words(self, value: Any) -> list[str]:
        return [self.flag] if self.kind is bool else [self.flag, str(value)]

    def read(self, value: Any) -> Any:
        """Return a value from Python or from a file as the field's type; a number may be a text."""
        if self.allowed is not None:
            return self._number(value, self.allowed)
        if self.kind is bool:
            return self._expect(value, isinstance(value, bool), "true or false")
        if self.kind is list:
            return self._expect(value, isinstance(value, list | tuple), "a list")
        taken = str | Path if self.kind is Path else str | int | float | Path
        self._expect(value, isinstance(value, taken) and not isinstance(value, bool), "a text")
        value = self.renewed(value)
        known = self.options.get("choices")
        if known and value not in known:
            raise ValueError(f"{self.name}={value!r} is unknown; choose from {', '.join(known)}")
        return self.kind(value)

    def renewed(self, value: Any) -> Any:
        """Return the new spelling of a value, with a warning where an old one was given."""
        new = _OLD.get(self.name, {}).get(value, value)
        if new != value:
            warnings.warn(f"{self.name}={value} is now spelled {self.name}={new}", FutureWarning, stacklevel=2)
        return new

    def _number(self, value: Any, allowed: Range) -> Any:
        if self.kind is float and value == NOT_CLIPPED:
            return value
        if isinstance(value, str):  # as YAML reads 1e-3
            try:
                value = self.kind(value)
            except ValueError as error:
                raise ValueError(f"{self.name}={value!r} {allowed.complaint(value)}") from error
        self._expect(value, not isinstance(value, bool), "a number")
        allowed.check(self.name, value)
        return value

    def _expect(self, value: Any, is_right: bool, kind: str) -> Any:
        if not is_right:
            raise ValueError(f"{self.name}={value!r} must be {kind}")
        return value


_KINDS: dict[Any, type] = {
    bool: bool,
    list[str]: list,
    str | None: str,
    Path | None: Path,
    int | None: int,
    float | str | None: float,
}


def _fields() -> dict[str, SpecField]:
    kinds, hints = get_type_hints(JobSpec), get_type_hints(JobSpec, include_extras=True)
    return {
        each.name: SpecField(
            each.name, _KINDS[kinds[each.name]], next(ranges_in(hints[each.name]), None), dict(each.metadata)
        )
        for each in fields(JobSpec)
    }


FIELDS = _fields()


def read_spec(path: Path) -> JobSpec:
    source = f"spec={str(path)!r}"
    held = read_fields(source, path, "a job", "seq_len: 4096")
    for name in held:
        if name not in FIELDS:
            raise ValueError(f"{source}: {name!r} is not a field of a job; the nearest is {nearest(name, FIELDS)}")
    try:
        return JobSpec(**held)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def read_fields(source: str, path: Path, owner: str, example: str) -> dict[str, Any]:
    """Read a file of fields without sections, YAML or JSON; the other arguments are for messages."""
    if not path.is_file():
        raise ValueError(f"{source} is not a file; name the YAML or JSON file with the fields of {owner}")
    try:
        given = read_values(path)
    except ValueError as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{source} holds no fields; write one in each line, such as {example}")
    return given


def nearest(name: object, known: Iterable[str]) -> str:
    return difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)[0]
