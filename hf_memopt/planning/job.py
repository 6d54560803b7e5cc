"""The fields that the flags of `hf-memopt estimate` and `plan`, a file, and Python share.

It imports no torch, so that `--help` and a misspelt flag take no time.
"""

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
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
    "adapters_dtype": ("auto", "float32", "bfloat16"),
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
# The names of Trainer's optimizers, and those of plans; the first name of each is written.
OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw-foreach",
    "adamw_torch_8bit": "adamw-8bit",
    "adamw_torch_4bit": "adamw-4bit",
    "adamw_bnb_8bit": "adamw-8bit-bnb",
    "adamw_8bit": "adamw-8bit-bnb",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "paged_adamw_32bit": "paged-adamw-32bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
}
# Other libraries' words for values.
_SAME: dict[str, dict[str, str]] = {
    "optimizer": OPTIMIZERS,
    "attention": {"flash_attention_2": "sdpa", "flash_attention_3": "sdpa"},
    "lora_targets": {"all": "all-linear"},
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "loss": {"nll": "chunked", "chunked_nll": "chunked"},
}
# Other libraries' names of fields, with the values that they stand for.
STAND_FOR: dict[str, tuple[str, dict[Any, Any]]] = {
    "bf16": ("precision", {True: "bf16", False: "no"}),
    "fp16": ("precision", {True: "fp16", False: "no"}),
    "gradient_checkpointing": ("checkpointing", {True: "full", False: "none"}),
    "load_in_4bit": ("quantize", {True: "nf4", False: "none"}),
    "load_in_8bit": ("quantize", {True: "int8-llm", False: "none"}),
    "qlora": ("quantize", {True: "nf4"}),
    "zero": ("engine", {2: "zero2", 3: "zero3"}),
}
# These change what other fields mean.
MODIFIERS = ("use_peft", "use_bnb_nested_quant")
# Adapters' rank where a word asks for adapters without one.
_USUAL_RANK = 16
# Fields of other libraries that change nothing here, or are not simulated.
REMEDIES = {
    "packing": "samples are simulated in their whole length, without padding; leave it out",
    "use_liger_kernel": "Liger's kernels are not simulated; SFTTrainer's loss holds no logits of all tokens, either",
    "deepspeed": "give --engine zero2 or zero3",
    "fsdp": "give --engine fsdp2",
    "activation_offloading": "give --offload all",
    "ema": "an average of the weights is not simulated; it takes their size in its dtype where it lives",
}
# Spellings that still work, and those that took their place.
_OLD = {"quantize": {"int8": "int8-llm"}, "base": {"resident": "off"}}
# transformers' own, of any model.
PLAIN_TRAINER = "trainer"
TRAINERS = (PLAIN_TRAINER, "sft", "dpo", "kto", "orpo", "reward", "grpo")
# Groups of flags.
MODEL, _STEP, _MACHINE, _OUTPUT = "with a model", "the step", "the machine", "output"
_CARD = (
    "a card (a100-80gb, 4090, ...), a size as cards are sold (24GB) or exactly (8GiB), or a size with a card's speed "
    "(48GB@l40s)"
)

Text = str | None
File = Path | None
Count = Annotated[int | None, COUNT]


@dataclass(frozen=True)
class About:
    """A field's name in transformers' and TRL's settings, the group of its flag, and the commands that have it."""

    trainer_field: str | None = None
    group: str = MODEL
    of: tuple[str, ...] = ("estimate", "plan")


def unsaid(text: str, **options: Any) -> Any:
    """Return a field that is None unless it is said, with its help text and `add_argument` options."""
    return flag(None, text, **options)


@dataclass(frozen=True, init=False)
class Job:
    """A training run, the card for it, and the answers that are asked for. Each field's help is its documentation.

    A field that is None, False or empty is not said: it is left to `DEFAULTS`, to the file of `training_args`, or to
    the recipe's configuration. transformers' `HfArgumentParser` reads the class, too; the command has a reader of its
    own (`job_flags`), since importing transformers takes more than a second.

    A field may also be given by its name in transformers' and TRL's settings, and in their terms: `max_length`,
    `per_device_train_batch_size`, `bf16=True`, `load_in_4bit=True`, `optim="adamw_torch"`.

    Raises:
        ValueError: a name is no field's, or a value none of its field's; or two names of a field have other values.
    """

    model: Annotated[Text, About(trainer_field="model_name_or_path")] = unsaid(
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
    recipe: Annotated[Text, About(group="")] = unsaid(
        "instead of MODEL: a recipe (default: the one that --config is named after)", metavar="NAME"
    )
    config: Annotated[File, About(group="")] = unsaid("the recipe's configuration file", metavar="FILE")
    set: Annotated[list[str], About(group="")] = flag(
        [],
        "one of the recipe's levers, or for a robot policy a flag of lerobot-train, such as "
        "policy.train_expert_only=false; may be repeated",
        metavar="NAME=VALUE",
    )
    gpu: Annotated[Text, About(group=_MACHINE)] = unsaid(f"the card to fit: {_CARD}")
    host: Annotated[Text, About(group=_MACHINE)] = unsaid(
        "host memory that may be used, such as 32GiB, or 32GiB@40GBps with its speed in updates (default: any)"
    )
    disk: Annotated[Text, About(group=_MACHINE)] = unsaid(
        "disk that takes what --host has no room for, with its speed in each direction, such as 500GiB@5GBps "
        "(default: none; without a speed, 2GBps is assumed)"
    )
    reserve: Annotated[Text, About(group=_MACHINE)] = unsaid(
        "device memory that other programs take, such as 1GiB for a desktop (default: none)"
    )
    link: Annotated[Text, About(group=_MACHINE)] = unsaid(
        "bandwidth between host and device, such as 12GBps (default: the card's)"
    )
    batch_size: Annotated[Count, About(trainer_field="per_device_train_batch_size", group=_STEP, of=("estimate",))] = (
        unsaid("samples per forward pass")
    )
    accumulation: Annotated[
        Count, About(trainer_field="gradient_accumulation_steps", group=_STEP, of=("estimate",))
    ] = unsaid("forward passes per update (default: 1, or the recipe's)")
    effective_batch: Annotated[Count, About(group=_STEP, of=("plan",))] = unsaid(
        "samples per update (default: the configuration's)"
    )
    task: Text = unsaid(
        "what the model learns; auto: by the class that the configuration names", choices=CHOICES["task"]
    )
    dtype: Annotated[Text, About(trainer_field="dtype")] = unsaid(
        "of the weights; auto: as the configuration says", choices=CHOICES["dtype"]
    )
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
    attention: Annotated[Text, About(trainer_field="attn_implementation")] = unsaid(
        "auto: transformers' choice", choices=CHOICES["attention"]
    )
    loss: Text = unsaid(
        "chunked: from the logits of a tile of tokens at a time, as TRL's SFTTrainer has it; full: from those of all, "
        "as transformers' Trainer has it (default: the trainer's)",
        choices=CHOICES["loss"],
    )
    optimizer: Annotated[Text, About(trainer_field="optim")] = unsaid(
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
    seq_len: Annotated[Count, About(trainer_field="max_length")] = unsaid(
        "tokens per sample, image tokens included, or frames of sound; 4k is 4,096"
    )
    lora_rank: Annotated[Count, About(trainer_field="lora_r")] = unsaid(
        "train adapters of this rank and freeze the rest (default: none)"
    )
    lora_targets: Annotated[Text, About(trainer_field="lora_target_modules")] = unsaid(
        "layers that get adapters, such as q_proj,v_proj (default: all-linear; for a denoiser, the layers that "
        "diffusers' scripts adapt)"
    )
    modules_to_save: Annotated[Text, About(trainer_field="lora_modules_to_save")] = unsaid(
        "modules that train whole next to the adapters, such as embed_tokens,lm_head"
    )
    adapters_dtype: Text = unsaid(
        "of adapters; auto: float32, or bfloat16 on a base in few bits, as TRL has them",
        choices=CHOICES["adapters_dtype"],
    )
    freeze_layers: Count = unsaid("do not train the input embeddings and this many of the first layers")
    images_per_sample: Count = unsaid("images with the text of a vision-language model")
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
        "device memory for frozen weights, such as 3GiB, of which visits use a part and the rest keeps weights there"
    )
    trained: bool = flag(
        False, "weights that train have the home of --base, too, with their gradients and the optimizer's state"
    )
    padding: bool = flag(False, "give batches an attention mask, as if some samples were shorter")
    use_rslora: Annotated[bool, About(trainer_field="use_rslora")] = flag(
        False, "scale adapters by the root of their rank (rsLoRA)"
    )
    use_dora: Annotated[bool, About(trainer_field="use_dora")] = flag(
        False, "adapters with a magnitude for each output (DoRA)"
    )
    max_grad_norm: Annotated[Annotated[float | str | None, POSITIVE], About(trainer_field="max_grad_norm")] = unsaid(
        "clip gradients to this norm; none: do not clip"
    )
    num_gpus: Count = unsaid("GPUs, with one process each; all figures are for one GPU")
    checkpointing: Annotated[Text, About(of=("estimate",))] = unsaid(
        "of activations; reentrant: torch's older kind, of all layers", choices=CHOICES["checkpointing"]
    )
    offload: Annotated[Text, About(of=("estimate",))] = unsaid("of activations", choices=CHOICES["offload"])
    check: Annotated[bool, About(group=_OUTPUT, of=("estimate",))] = flag(
        False, "exit status 1 if it does not fit on --gpu"
    )
    explain: Annotated[bool, About(group=_OUTPUT, of=("plan",))] = flag(False, "say why each lever is used or not")
    json: Annotated[File, About(group=_OUTPUT)] = unsaid("also write everything as JSON", metavar="FILE")
    timeline: Annotated[File, About(group=_OUTPUT, of=("estimate",))] = unsaid(
        "also draw memory over the step, by kind", metavar="FILE.html"
    )
    snapshot: Annotated[File, About(group=_OUTPUT, of=("estimate",))] = unsaid(
        "also write a memory snapshot, which https://pytorch.org/memory_viz opens like that of a real run",
        metavar="FILE.pickle",
    )
    output: Annotated[File, About(group=_OUTPUT, of=("plan",))] = unsaid(
        "folder for the chosen configuration and an accelerate config (default: plans/NAME)"
    )
    vary: Annotated[Text, About(group=_STEP, of=("plan",))] = unsaid(
        "levers besides activations and micro-batch: some of optimizer, base, precision and quantize, such as "
        "optimizer,precision (default: those that change no bit, the homes of weights and of the optimizer's state)",
        metavar="LEVERS",
    )
    workers: Annotated[Count, About(group=_OUTPUT, of=("plan",))] = unsaid(
        "simulations at once (default: one per core)"
    )

    def __init__(self, model: Any = None, training_args: Any = None, **given: Any) -> None:
        read = translated({"model": model, "training_args": training_args} | given)
        for each in fields(self):
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            value = read.get(each.name, default)
            is_said = not (value is None or value is False or value == [])
            object.__setattr__(self, each.name, FIELDS[each.name].read(value) if is_said else default)

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
    """A field: the type of its values, their range, and `add_argument` options."""

    name: str
    kind: type
    allowed: Range | None
    options: dict[str, Any]
    about: About

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> list[str]:
        """Return the flag, and the name that the field has in a trainer's settings as one."""
        other = self.about.trainer_field or self.name
        return list(dict.fromkeys([self.flag, f"--{other.replace('_', '-')}"]))

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
        """Return our word for a value of other libraries, or the new spelling, with a warning for an old one."""
        value = _SAME.get(self.name, {}).get(value, value)
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
    kinds, hints, found = get_type_hints(Job), get_type_hints(Job, include_extras=True), {}
    for each in fields(Job):
        hint = hints[each.name]
        about = next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, About)), About())
        kind, allowed = _KINDS[kinds[each.name]], next(ranges_in(hint), None)
        found[each.name] = SpecField(each.name, kind, allowed, dict(each.metadata), about)
    return found


FIELDS = _fields()


_OF_TRAINERS = {each.about.trainer_field: name for name, each in FIELDS.items() if each.about.trainer_field is not None}


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a job, some of which are given by names of transformers' and TRL's settings."""
    found: dict[str, Any] = {}
    said_as: dict[str, str] = {}
    for name, value in given.items():
        if name in REMEDIES:
            raise ValueError(f"{name}: {REMEDIES[name]}")
        if name in MODIFIERS or value is None:
            continue
        if name in STAND_FOR:
            field, values = STAND_FOR[name]
            if value not in values:
                raise ValueError(f"{name}={value!r} is not simulated; choose from {', '.join(map(str, values))}")
            value = values[value]
            if value in ("no", "none") and field in found:
                continue
        else:
            field = name if name in FIELDS else _OF_TRAINERS.get(name, "")
            if not field:
                known = [*FIELDS, *_OF_TRAINERS, *STAND_FOR]
                raise ValueError(f"{name!r} is not a field of a job; the nearest is {nearest(name, known)}")
        if found.setdefault(field, value) != value and found[field] not in ("no", "none"):
            other = said_as[field]
            raise ValueError(f"{name}={given[name]!r} and {other}={given[other]!r}: name one of them")
        found[field], said_as[field] = value, name
    if (given.get("use_peft") or given.get("qlora")) and found.get("lora_rank") is None:
        found["lora_rank"] = _USUAL_RANK
    if given.get("use_peft") is False:
        found.pop("lora_rank", None)
    if given.get("use_bnb_nested_quant") and found.get("quantize") == "nf4":
        found["quantize"] = "nf4-double"
    return found


def read_spec(path: Path) -> Job:
    source = f"spec={str(path)!r}"
    try:
        return Job(**read_fields(source, path, "a job", "seq_len: 4096"))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(source) else f"{source}: {text}") from error


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
