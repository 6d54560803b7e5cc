"""Files of LLaMA-Factory and axolotl, whose trainers derive from transformers', in its words and TRL's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_memopt.planning.models.adapters import ALL_LINEAR

Fields = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A program that trains by a file.

    Attributes:
        name: for messages.
        module: starts a training, before the file.
        marks: fields that other files do not have.
        renamed: fields that have another name, but the same values.
        read: the fields that follow from several, or have other values.
        back: of the fields that a plan changes, those that have other values in the program.
    """

    name: str
    module: str
    marks: frozenset[str]
    renamed: Mapping[str, str]
    read: Callable[[Mapping[str, Any]], Fields]
    back: Callable[[Mapping[str, Any]], Fields]

    def translated(self, given: Mapping[str, Any], known: set[str], source: str) -> tuple[Fields, list[str]]:
        """Return the fields of a file in the words of transformers and TRL, and the names of those that say no more.

        Raises:
            ValueError: the file is for a training that is not simulated.
        """
        try:
            found = self.read(given)
        except ValueError as error:
            raise ValueError(f"{source}: {error}; {self.name}'s other trainings are not simulated") from error
        plain = {self.renamed.get(name, name): value for name, value in given.items()}
        fields = {name: value for name, value in plain.items() if name in known} | found
        return fields, [name for name in given if self.renamed.get(name, name) not in fields and name not in _READ]

    def own_fields(self, chosen: Mapping[str, Any]) -> Fields:
        """Return fields of transformers and TRL, which a plan has chosen, as the program's."""
        own_names = {name: own for own, name in self.renamed.items()}
        return {own_names.get(name, name): value for name, value in self.back(chosen).items()}


# Read, under another name, into the fields above.
_READ = {"stage", "finetuning_type", "pure_bf16", "quantization_bit", "lora_target", "flash_attn", "adapter"}
_READ |= {"disable_gradient_checkpointing", "use_reentrant_gc", "lora_target_linear", "flash_attention"}
_ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}


def _of_llama_factory(given: Mapping[str, Any]) -> Fields:
    stage, tuning = given.get("stage", "sft"), given.get("finetuning_type", "lora")
    if stage != "sft":
        raise ValueError(f"stage={stage!r} is not sft")
    if tuning not in ("lora", "full"):
        raise ValueError(f"finetuning_type={tuning!r} is neither lora nor full")
    # It loads weights in 16 bits, and makes those float32 that train, but for pure_bf16.
    is_16_bit = given.get("pure_bf16") or (tuning == "lora" and (given.get("bf16") or given.get("fp16")))
    fields: Fields = {
        "max_length": given.get("cutoff_len", 2048),
        "dtype": "float32" if not is_16_bit else "float16" if given.get("fp16") else "bfloat16",
        "gradient_checkpointing": not given.get("disable_gradient_checkpointing", False),
        "gradient_checkpointing_kwargs": {"use_reentrant": given.get("use_reentrant_gc", True)},
        "attn_implementation": _ATTENTION.get(str(given.get("flash_attn"))),
        "load_in_4bit": given.get("quantization_bit") == 4,
        "load_in_8bit": given.get("quantization_bit") == 8,
    }
    if tuning == "lora":
        target, rank = given.get("lora_target", "all"), given.get("lora_rank", 8)
        targets = ALL_LINEAR if target == "all" else target if isinstance(target, list) else str(target).split(",")
        fields |= {"use_peft": True, "lora_r": rank, "lora_target_modules": targets}
        fields |= {"lora_dropout": given.get("lora_dropout", 0.0)}
    return fields


def _to_llama_factory(chosen: Mapping[str, Any]) -> Fields:
    fields = dict(chosen)
    if "gradient_checkpointing" in fields:
        fields["disable_gradient_checkpointing"] = not fields.pop("gradient_checkpointing")
        kwargs = fields.pop("gradient_checkpointing_kwargs", None) or {}
        fields["use_reentrant_gc"] = kwargs.get("use_reentrant", True)
    return fields


def _of_axolotl(given: Mapping[str, Any]) -> Fields:
    if given.get("rl"):
        raise ValueError(f"rl={given['rl']!r} is not supervised fine-tuning")
    precision, checkpointing = given.get("bf16", False), given.get("gradient_checkpointing", False)
    if checkpointing not in (True, False, None):
        raise ValueError(f"gradient_checkpointing={checkpointing!r} is neither true nor false")
    fields: Fields = {
        "bf16": precision in (True, "auto"),
        "dtype": "bfloat16" if precision else "float16" if given.get("fp16") else "float32",
        "attn_implementation": given.get("attn_implementation")
        or ("flash_attention_2" if given.get("flash_attention") else None),
    }
    if given.get("adapter") is not None:
        if given["adapter"] not in ("lora", "qlora"):
            raise ValueError(f"adapter={given['adapter']!r} is neither lora nor qlora")
        targets = ALL_LINEAR if given.get("lora_target_linear") else given.get("lora_target_modules", ALL_LINEAR)
        fields |= {"use_peft": True, "lora_target_modules": targets, "lora_r": given.get("lora_r", 8)}
        fields |= {"lora_dropout": given.get("lora_dropout") or 0.0}
    return fields


TOOLS = (
    Tool(
        "LLaMA-Factory",
        "llamafactory.cli train",
        frozenset({"finetuning_type", "cutoff_len", "quantization_bit", "lora_rank"}),
        {
            "cutoff_len": "max_length",
            "lora_rank": "lora_r",
            "double_quantization": "use_bnb_nested_quant",
            "additional_target": "lora_modules_to_save",
        },
        _of_llama_factory,
        _to_llama_factory,
    ),
    Tool(
        "axolotl",
        "axolotl.cli.train",
        frozenset({"base_model", "sequence_len", "micro_batch_size"}),
        {
            "base_model": "model_name_or_path",
            "sequence_len": "max_length",
            "micro_batch_size": "per_device_train_batch_size",
            "optimizer": "optim",
        },
        _of_axolotl,
        dict,
    ),
)


def tool_of(given: Mapping[str, Any]) -> Tool | None:
    return next((tool for tool in TOOLS if not tool.marks.isdisjoint(given)), None)
