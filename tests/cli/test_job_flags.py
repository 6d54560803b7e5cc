"""`--spec FILE`, the flags that win over it, and errors with the names that the user typed."""

from pathlib import Path
from typing import Any

import pytest
from refused import refused

from hf_memopt.cli import main, planning_commands
from hf_memopt.planning import Job, job_flags
from hf_memopt.planning.job import FIELDS

Capture = pytest.CaptureFixture[str]
FILE = "model: a/model\nseq_len: 64\ndtype: bfloat16\neffective_batch: 8\npadding: true\ngpu: 8GiB\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(FILE)
    return str(tmp_path / "job.yaml")


def spec_of(monkeypatch: pytest.MonkeyPatch, command: str, *words: str) -> Job:
    found: list[Job] = []
    monkeypatch.setattr(planning_commands, f"_{command}", lambda spec: found.append(spec) or 0)
    assert main([command, *words]) == 0
    return found[0]


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_flags_win_over_the_file(command: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"model": "a/model", "seq_len": 64, "dtype": "bfloat16", "effective_batch": 8, "padding": True}
    assert spec_of(monkeypatch, command, "--spec", file).said() == said | {"gpu": "8GiB"}
    found = spec_of(monkeypatch, command, "b/model", "--spec", file, "--seq-len", "32", "--gpu", "t4")
    assert found.said() == said | {"model": "b/model", "seq_len": 32, "gpu": "t4"}


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_a_model_is_named_with_and_without_a_flag(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for words in (["a/model", "--gpu", "t4"], ["--model", "a/model", "--gpu=t4"], ["--gpu=t4", "--", "a/model"]):
        assert spec_of(monkeypatch, command, *words) == Job("a/model", gpu="t4")
    assert "not allowed with argument" in refused(capsys, command, "a/model", "--model", "b/model", "--gpu", "t4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-length 64 --per_device_train_batch_size 2", {"seq_len": 64, "batch_size": 2}),
        ("--bf16 --gradient-checkpointing", {"precision": "bf16", "checkpointing": "full"}),
        ("--fp16 true --bf16 false", {"precision": "fp16"}),
        ("--bf16 false", {"precision": "no"}),
        ("--qlora", {"quantize": "nf4", "lora_rank": 16}),
        ("--load-in-4bit --use-bnb-nested-quant --lora-r 8", {"quantize": "nf4-double", "lora_rank": 8}),
        ("--optimizer adamw_torch --attention flash_attention_2", {"optimizer": "adamw-foreach", "attention": "sdpa"}),
        ("--optim adamw_bnb_8bit --zero 3", {"optimizer": "adamw-8bit-bnb", "engine": "zero3"}),
        ("--seq-len 4k --lora-targets all", {"seq_len": 4096, "lora_targets": "all-linear"}),
    ],
)
def test_words_of_other_libraries_are_ours(words: str, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec_of(monkeypatch, "estimate", *words.split()).said() == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--packing", "packing: samples are simulated in their whole length"),
        ("--use-liger-kernel", "--use-liger-kernel: Liger's kernels are not simulated"),
        ("--deepspeed ds.json", "deepspeed: give --engine zero2 or zero3"),
        ("--bf16 --precision fp16", "--precision='fp16' and --bf16=True: name one of them"),
        ("--zero 1", "zero=1 is not simulated; choose from 2, 3"),
        ("--sq-len 4", "unrecognized arguments: --sq-len; the nearest is --seq-len"),
    ],
)
def test_words_that_stand_for_nothing_are_answered(words: str, message: str, capsys: Capture) -> None:
    assert message in refused(capsys, "estimate", *words.split())


def test_flags_that_are_not_typed_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec_of(monkeypatch, "estimate") == Job()
    words = ["--batch-size", "1", "--seq-len=2048", "--set", "a=b", "--set", "c=d", "--max-grad-norm", "none"]
    said = {"batch_size": 1, "seq_len": 2048, "set": ["a=b", "c=d"], "max_grad_norm": "none"}
    assert spec_of(monkeypatch, "estimate", *words).said() == said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_ln: 3", "--spec='job.yaml': 'seq_ln' is not a field of a job; the nearest is seq_len"),
        ("seq_len: 0", "--spec='job.yaml': seq_len=0 must be at least 1"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text)
    for command in ("estimate", "plan"):
        assert refused(capsys, command, "--spec", "job.yaml") == f"hf-memopt {command}: error: {message}\n"


def test_a_plan_needs_a_card(capsys: Capture) -> None:
    assert "name one, or a size such as 8GiB, with --gpu" in refused(capsys, "plan", "a/model")


def test_a_field_from_the_file_keeps_its_name(file: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def complain(spec: Job) -> int:
        raise ValueError("seq_len=64 with lora_rank=2 and padding=True: use task='ctc'")

    monkeypatch.setattr(planning_commands, "_estimate", complain)
    told = refused(capsys, "estimate", "--spec", file, "--lora-rank", "2")
    assert told.endswith("error: seq_len=64 with --lora-rank=2 and padding=True: use --task='ctc'\n")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("seq_len=0 must be at least 1", "--seq-len=0 must be at least 1"),
        ("quantize='nf4': for adapters; give a lora_rank", "--quantize='nf4': for adapters; give a --lora-rank"),
        ("padding=True: leave it out", "--padding: leave it out"),
        ("use_dora=True and freeze_vision_tower", "--use-dora and --freeze-vision-tower"),
        ("the task is not simulated; check the path", "the task is not simulated; check the path"),
        ("model='x': image_size=-1 must be at least 0", "model='x': image_size=-1 must be at least 0"),
        ("'seq_len' and /tmp/seq_len and --seq-len", "'seq_len' and /tmp/seq_len and --seq-len"),
        ("max_seq_len=3", "max_seq_len=3"),
    ],
)
def test_fields_become_flags_in_messages(message: str, named: str) -> None:
    assert job_flags.with_flags(message, FIELDS.keys() - {"model"}) == named


def test_an_error_that_names_no_field_is_not_touched() -> None:
    error: Any = ValueError("no word of it")
    with pytest.raises(ValueError, match="no word") as caught, job_flags.flags_named({"seq_len"}):
        raise error
    assert caught.value is error
