"""Fields of TrainingArguments that have been renamed: the installed transformers decides, and here both kinds of it."""

from dataclasses import dataclass

import pytest
from late_imports import LateModule

argument_names = LateModule("hf_memopt.integrations.transformers.argument_names")
transformers = LateModule("transformers")
PLACE = "hf_memopt.integrations.transformers.argument_names.TrainingArguments"


@dataclass
class Older:
    gradient_checkpointing: bool = False
    learning_rate: float = 1.0


@dataclass
class Both(Older):
    activation_checkpointing: bool = False


def test_an_older_version_is_given_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACE, Older)
    assert argument_names.current_names({"gradient_checkpointing": True, "other": 1}) == {
        "gradient_checkpointing": True,
        "other": 1,
    }
    arguments = Older()
    argument_names.set_fields(arguments, {"gradient_checkpointing": True, "learning_rate": 2.0})
    assert vars(arguments) == {"gradient_checkpointing": True, "learning_rate": 2.0}


def test_a_version_with_both_is_given_the_newer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACE, Both)
    assert list(argument_names.current_names({"gradient_checkpointing": True, "other": 1})) == [
        "activation_checkpointing",
        "other",
    ]
    both = {"activation_checkpointing": False, "gradient_checkpointing": True}
    for given in (both, dict(reversed(both.items()))):
        assert argument_names.current_names(given) == {"activation_checkpointing": False}
    arguments = Both()
    argument_names.set_fields(arguments, {"gradient_checkpointing": True, "learning_rate": 2.0})
    assert arguments == Both(True, 2.0, True)


def test_trainers_arguments_say_what_was_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path_factory.mktemp("out")), use_cpu=True)
    argument_names.set_fields(arguments, {"gradient_checkpointing": True})
    assert arguments.gradient_checkpointing
    assert getattr(arguments, "activation_checkpointing", True)
