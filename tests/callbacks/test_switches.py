"""Switches of `verify`: the texts that name them, and the places where they take effect."""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from late_imports import LateModule

switches = LateModule("hf_memopt.callbacks.recorded_script")
transformers = LateModule("transformers")
trl = LateModule("trl")


def test_each_kind_of_text() -> None:
    found = switches.Switches.from_texts(
        [
            "gradient_checkpointing=true",
            'gradient_checkpointing_kwargs={"use_reentrant": true, "a": "b=c"}',
            "env:PATH_OF_THINGS=a=b:c",
            "torch:_functorch.config.activation_memory_budget=0.5",
            "offload=all",
            "script:--attention=sdpa",
            "script:more",
        ]
    )
    assert found.arguments == {
        "gradient_checkpointing": "true",
        "gradient_checkpointing_kwargs": '{"use_reentrant": true, "a": "b=c"}',
    }
    assert found.environment == {"PATH_OF_THINGS": "a=b:c"}
    assert found.torch_flags == {"_functorch.config.activation_memory_budget": "0.5"}
    assert found.ours == {"offload": "all"}
    assert found.script == ["--attention=sdpa", "more"]
    assert not found.are_fields_alone
    assert switches.Switches.from_texts(["bf16=true"]).are_fields_alone


@pytest.mark.parametrize("text", ["", "bf16", "=3", "env:=3", "env:A", "other:a=1", ":a=1", "torch:=1", "script:"])
def test_a_text_that_is_no_switch(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^switch={re.escape(repr(text))} is none; use FIELD=VALUE .* script:WORD$"):
        switches.Switches.from_texts([text])


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["bf16=true", "bf16=false"], "switch='bf16=false': bf16 has the value 'true' already; name it once"),
        (["env:HF_MEMOPT=offload=all"], "switch=env:HF_MEMOPT: a run that is recorded does not read it; use FIELD"),
        (["offload=sometimes"], "switch=offload=sometimes: .*'sometimes' .choose from 'off', 'auto', 'all'"),
        (["budget_gib=six", "offload=auto"], "switch=budget_gib=six offload=auto: .*invalid float value: 'six'$"),
        (["offload_threshold_mb=-1"], "offload_threshold_mb=-1.0 must be at least 0"),
        (["budget_gib=6", "offload=all"], "budget_gib=6.0 needs offload=auto"),
        (["torch:no.such=1"], "switch=torch:no.such=1: there is no flag torch.no.such; check its name"),
        (["torch:_functorch.config.no_such=1"], "there is no flag torch._functorch.config.no_such"),
        (["torch:backends.cuda.matmul.allow_tf32=maybe"], "allow_tf32 is (True|False) without it; use true or false"),
        (["torch:backends.cuda.matmul.allow_tf32=1"], "use true or false"),
        (["torch:_functorch.config.activation_memory_budget=half"], "is 1.0 without it; use a number"),
        (["torch:_functorch.config.activation_memory_budget=true"], "is 1.0 without it; use a number"),
    ],
)
def test_a_switch_that_is_refused_before_any_run(texts: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        switches.Switches.from_texts(texts)
    assert "\n" not in str(refused.value)


def test_ours_perform_copies_on_a_cpu_and_log_nothing() -> None:
    made = switches.Switches.from_texts(["offload=all", "offload_threshold_mb=0", "skip=visual lm_head"]).make_memopt()
    assert (made.offload, made.offload_threshold_mb, made.cpu_copies, made.memory_log) == ("all", 0, True, False)
    assert made.skip == ["visual", "lm_head"]
    of_base = switches.Switches.from_texts(["base=host"]).make_memopt()
    assert (of_base.offload, of_base.base, of_base.cpu_copies) == ("off", "host", False)
    assert switches.Switches.from_texts(["bf16=true"]).make_memopt() is None


def test_flags_of_torch_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = config.activation_memory_budget
    try:
        switches.set_torch_flags(
            {"_functorch.config.activation_memory_budget": "0.25", "backends.cudnn.benchmark": "true"}
        )
        assert config.activation_memory_budget == 0.25
        assert torch.backends.cudnn.benchmark is True
    finally:
        config.activation_memory_budget = before


@pytest.mark.parametrize(("text", "value"), [("true", True), ("None", None), ("3", 3), ("[1]", [1]), ("word", "word")])
def test_values_of_flags(text: str, value: Any) -> None:
    assert switches._literal(text) == value


@pytest.fixture
def install(arguments_put_back: Any) -> Iterator[Callable[..., Any]]:
    """A function that installs `SwitchedArguments`."""

    def install(given: dict[str, str], *, is_switched: bool = True, must_change: bool = False, **forced: Any) -> Any:
        made = switches.SwitchedArguments(given, forced, is_switched=is_switched, must_change=must_change)
        made.install()
        return made

    with arguments_put_back():
        yield install


QUIET = {"use_cpu": True, "report_to": "none"}


def test_fields_are_set_in_every_instance(install: Any, tmp_path: Any) -> None:
    made = install(
        {
            "gradient_checkpointing": "true",
            "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
            "max_steps": "7",
            "learning_rate": "1e-3",
            "optim": "sgd",
        },
        save_strategy="no",
        not_a_field=3,
    )
    assert not made.were_used
    for _ in range(2):
        args = transformers.TrainingArguments(str(tmp_path), max_steps=3, save_strategy="steps", **QUIET)
        assert (args.output_dir, args.gradient_checkpointing, args.max_steps) == (str(tmp_path), True, 7)
        assert (args.learning_rate, args.optim, args.save_strategy) == (1e-3, "sgd", "no")
        assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert made.were_used
    again = replace(args, max_steps=5)
    assert (again.max_steps, copy.copy(again).max_steps) == (7, 7)


def test_a_plain_run_checks_and_changes_nothing_but_what_is_forced(install: Any, tmp_path: Any) -> None:
    made = install({"max_steps": "7"}, is_switched=False, eval_strategy="no")
    args = transformers.TrainingArguments(str(tmp_path), max_steps=3, eval_strategy="steps", **QUIET)
    assert (args.max_steps, args.eval_strategy) == (3, "no")
    assert made.were_used


def test_classes_that_are_derived_later(install: Any, tmp_path: Any) -> None:
    install({"max_length": "none", "packing": "true", "padding_free": "false"})
    args = trl.SFTConfig(str(tmp_path), max_length=12, bf16=False, **QUIET)
    assert (args.max_length, args.packing, args.padding_free) == (None, True, False)

    @dataclass
    class Derived(transformers.TrainingArguments):
        max_length: int | None = 3
        packing: bool = False
        padding_free: bool = True

    assert (Derived(str(tmp_path), **QUIET).packing, Derived(str(tmp_path), **QUIET).padding_free) == (True, False)


def test_a_derived_class_with_an_init_of_its_own(install: Any, tmp_path: Any) -> None:
    install({"max_steps": "7"}, save_strategy="no")

    class Derived(transformers.TrainingArguments):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    args = Derived(output_dir=str(tmp_path), save_strategy="steps", **QUIET)
    assert (args.max_steps, args.save_strategy) == (7, "no")


def test_arguments_that_a_parser_makes(install: Any, tmp_path: Any) -> None:
    install({"max_steps": "7"})
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--max_steps=2", "--use_cpu"])
    assert args.max_steps == 7


@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize(
    ("switch", "complaint"),
    [
        (
            {"gradient_checkpoint": "1"},
            "switch=gradient_checkpoint=1: TrainingArguments has no such field; similar are",
        ),
        ({"offlaod": "all"}, "switch=offlaod=all: TrainingArguments has no such field; similar are offload"),
        ({"zzz": "1"}, "switch=zzz=1: TrainingArguments has no such field$"),
        ({"max_steps": "many"}, "switch=max_steps=many: .*invalid int value: 'many'; use a value of TrainingArguments"),
        ({"bf16": "perhaps"}, "switch=bf16=perhaps: .*Truthy value expected.*; use a value of TrainingArguments"),
        ({"optim": "adamx"}, "switch=optim=adamx: .*invalid choice: 'adamx'"),
    ],
)
def test_a_field_that_the_class_has_not_or_a_bad_value(
    switch: dict[str, str], complaint: str, is_switched: bool, install: Any, tmp_path: Any
) -> None:
    install(switch, is_switched=is_switched)
    with pytest.raises(switches.SwitchError, match=complaint) as refused:
        transformers.TrainingArguments(str(tmp_path), **QUIET)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("must_change", "value", "refuses"), [(True, 3, True), (True, 4, False), (False, 3, False)])
def test_a_switch_that_the_script_has_on_already(
    must_change: bool, value: int, refuses: bool, install: Any, tmp_path: Any
) -> None:
    install({"max_steps": "3"}, is_switched=False, must_change=must_change)
    if not refuses:
        assert transformers.TrainingArguments(str(tmp_path), max_steps=value, **QUIET).max_steps == value
        return
    with pytest.raises(switches.SwitchError, match="max_steps=3: the script's TrainingArguments has that already"):
        transformers.TrainingArguments(str(tmp_path), max_steps=value, **QUIET)


def test_words_that_mean_something_are_no_none(install: Any, tmp_path: Any) -> None:
    install({"report_to": "none", "gradient_checkpointing_kwargs": "None"})
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="tensorboard")
    assert args.report_to == []
    assert args.gradient_checkpointing_kwargs is None


def test_ours_are_the_fields_of_memopt_arguments() -> None:
    from hf_memopt.callbacks import MemoptArguments

    assert set(switches._OURS) == {each.name for each in fields(MemoptArguments)}
