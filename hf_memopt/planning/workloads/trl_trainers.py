"""TRL's trainers that a command can name: their settings, the samples that they are simulated on, and their scripts."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hf_memopt.planning.models.quiet import quiet

# A word and the mark that ends a text, one token each.
WORD, END = "word", "</s>"
Rows = dict[str, list[Any]]


@dataclass(frozen=True)
class TrlTrainer:
    name: str  # after `--trainer`
    prefix: str  # of the names of its class and of its settings
    rows: Callable[[Any, int, int], Rows]  # its data, from its settings, the tokens of a sample and how many samples
    sample: str  # of the first line, with the tokens for {tokens}, {prompt} and {completion}
    package: str = "trl"  # that has both classes
    script: str = ""  # the module that trains with a file
    task: str = "causal"  # that its model is built for
    # Whether it calls PEFT's preparation of quantised models, after which their other weights are float32.
    prepares: bool = False
    # Fields of the file without which the script has no data or no goal, with placeholders.
    needs: tuple[tuple[str, str], ...] = (("dataset_name", "DATASET"),)

    @property
    def class_name(self) -> str:
        return f"{self.prefix}Trainer"

    @property
    def module(self) -> str:
        return self.script or f"trl.scripts.{self.name}"

    @property
    def config(self) -> Any:
        return self._named(f"{self.prefix}Config")

    @property
    def kind(self) -> Any:
        return self._named(self.class_name)

    def _named(self, name: str) -> Any:
        with quiet():
            return getattr(importlib.import_module(self.package), name)

    def dataclasses(self) -> tuple[Any, ...]:
        """Return the classes whose fields a file for its script has."""
        from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

        script: Any = ScriptArguments
        if self.name == "grpo":
            script = importlib.import_module("trl.scripts.grpo").GRPOScriptArguments
        return self.config, ModelConfig, script, DatasetMixtureConfig

    def names(self) -> set[str]:
        """Return the fields of a file for its script; `env` are variables."""
        return {"env"} | {field.name for kind in self.dataclasses() for field in fields(kind)}

    @property
    def truncates(self) -> bool:
        return self.name != "grpo"

    def least_batch(self, arguments: Any) -> int:
        """Return the least samples in a forward pass: KTO's baseline is a mean over other pairs of the same pass."""
        return 2 if _has_baseline(arguments) else 1

    def notes(self, arguments: Any, is_quantised: bool) -> list[str]:
        notes = []
        if is_quantised:
            kept = "are made float32 by PEFT's preparation" if self.prepares else "keep their type"
            notes.append(f"weights that are not quantised {kept}")
        if _has_baseline(arguments):
            notes.append("KTO's baseline is a mean over each forward pass, so its size is part of the loss")
        if getattr(arguments, "use_vllm", False):
            notes.append("generation on a vLLM server takes no memory here")
        if self.name == "grpo":
            notes.append("times without generation and scoring")
        return notes

    def lacking(self, given: Mapping[str, Any]) -> str:
        """Return flags with placeholders for names that the script needs and the file lacks."""
        said = {"dataset_name" if name == "datasets" else name for name, value in given.items() if value}
        return "".join(f" --{name} {value}" for name, value in self.needs if name not in said)

    def describe(self, arguments: Any, tokens: int) -> str:
        completion = completion_tokens(arguments, tokens)
        return self.sample.format(tokens=f"{tokens:,}", prompt=f"{tokens - completion:,}", completion=f"{completion:,}")


def _has_baseline(arguments: Any) -> bool:
    return hasattr(arguments, "undesirable_weight") and arguments.loss_type != "apo_zero_unpaired"


def completion_tokens(arguments: Any, tokens: int) -> int:
    """Return how many of a sample's tokens are its completion: as the settings say, or half of them."""
    said: int | None = getattr(arguments, "max_completion_length", None)
    if said is not None and said >= tokens:
        raise ValueError(
            f"seq_len={tokens} has no room for a prompt before max_completion_length={said}; name prompt and "
            "completion together"
        )
    return tokens // 2 if said is None else said


def need_trl(asked: str) -> None:
    if importlib.util.find_spec("trl") is None:
        raise ValueError(f"{asked}; for the trainers of TRL: pip install trl")


def trainer_for(given: Mapping[str, Any], source: str) -> TrlTrainer | None:
    """Find the trainer that has all the fields, preferably SFT's; return None if there is none.

    Raises ValueError where several others have them, or no trainer has all that some have.
    """
    known = {each: each.names() for each in TRL.values()}
    having = [each for each, names in known.items() if given.keys() <= names]
    if having and having[0] is TRL["sft"]:
        return having[0]
    special = ", ".join(sorted(given.keys() - TRL["sft"].names()))
    if len(having) > 1:
        *names, last = (each.name for each in having)
        raise ValueError(f"{source}: {special} may be for several trainers; say trainer={', '.join(names)} or {last}")
    if not having and all(any(field in names for names in known.values()) for field in given):
        raise ValueError(f"{source}: no trainer of TRL has all of {special}; leave out those of the others")
    return having[0] if having else None


def _tokens(arguments: Any, tokens: int, count: int) -> Rows:
    return {"input_ids": [[0] * tokens] * count}


def _scored(arguments: Any, tokens: int, count: int) -> Rows:
    rows = [[0] * tokens] * count
    return {"chosen_ids": rows, "rejected_ids": rows}


def _pairs(arguments: Any, tokens: int, count: int) -> Rows:
    prompt, completion = _texts(arguments, tokens)
    return {"prompt": [prompt] * count, "chosen": [completion] * count, "rejected": [completion] * count}


def _judged(arguments: Any, tokens: int, count: int) -> Rows:
    prompt, completion = _texts(arguments, tokens)
    labels = [bool(number % 2) for number in range(count)]
    return {"prompt": [prompt] * count, "completion": [completion] * count, "label": labels}


def _prompts(arguments: Any, tokens: int, count: int) -> Rows:
    num_prompts = max(1, arguments.generation_batch_size // arguments.num_generations)
    return {"prompt": [_texts(arguments, tokens)[0]] * num_prompts}


def _texts(arguments: Any, tokens: int) -> tuple[str, str]:
    """Return a prompt and a completion; the trainers put the mark at its end."""
    completion = completion_tokens(arguments, tokens)
    return f"{WORD} " * (tokens - completion), f"{WORD} " * (completion - 1) + END


_PAIR = "chosen and rejected of {tokens} tokens each, prompt included"
TRL = {
    each.name: each
    for each in (
        TrlTrainer("sft", "SFT", _tokens, "{tokens} tokens in each sample"),
        TrlTrainer("dpo", "DPO", _pairs, _PAIR),
        TrlTrainer("kto", "KTO", _judged, "{tokens} tokens in each sample, prompt included"),
        TrlTrainer(
            *("orpo", "ORPO", _pairs, _PAIR, "trl.experimental.orpo"),
            script="hf_memopt.integrations.train_orpo",
            prepares=True,
        ),
        TrlTrainer("reward", "Reward", _scored, _PAIR, task="sequence-classification"),
        TrlTrainer(
            *("grpo", "GRPO", _prompts, "prompts of {prompt} and completions of {completion} tokens"),
            needs=(("dataset_name", "DATASET"), ("reward_funcs", "MODULE.FUNCTION")),
        ),
    )
}
