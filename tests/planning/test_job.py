"""Descriptions of jobs: one table of choices, and equal values from Python, files and transformers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from late_imports import LateModule

from hf_memopt.planning import Job
from hf_memopt.planning.job import CHOICES, PLAIN_TRAINER, TRAINERS, read_spec

accelerate_config = LateModule("hf_memopt.planning.models.accelerate_config")
trainer_fields = LateModule("hf_memopt.planning.workloads.trainer_fields")
quantised_base = LateModule("hf_memopt.planning.simulation.quantised.quantised_base")
tasks = LateModule("hf_memopt.planning.models.tasks")
transformers = LateModule("transformers")
workloads = LateModule("hf_memopt.planning.workloads.of_job")
trl_trainers = LateModule("hf_memopt.planning.workloads.trl_trainers")


def test_each_choice_is_made_by_the_library_and_no_other() -> None:
    assert CHOICES["task"] == ("auto", *tasks.TASKS)
    assert {*CHOICES["optimizer"]} <= {*trainer_fields.OPTIMIZERS.values()}
    assert CHOICES["quantize"] == ("auto", "none", *quantised_base.LAYERS)
    assert (PLAIN_TRAINER, *trl_trainers.TRL) == TRAINERS
    named = ("DDP", "FSDP2", "FSDP2_NO_RESHARD", "ZERO2", "ZERO3")
    assert CHOICES["engine"] == tuple(getattr(accelerate_config, name) for name in named)


def test_reading_a_spec_imports_no_library(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("seq_len: 32")
    read = "import sys; from pathlib import Path; from hf_memopt.planning.job import read_spec; "
    read += "read_spec(Path('job.yaml')); print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert {"hf_memopt", "yaml"} <= imported
    assert not imported & {"torch", "transformers", "accelerate", "numpy", "huggingface_hub"}


def test_what_is_not_said_is_left_to_others() -> None:
    assert Job().said() == {}
    said = {"seq_len": 2048, "padding": True, "set": ["a=b"], "precision": "no"}
    assert Job(**said, use_dora=False).said() == said


GIVEN: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "training_args": "sft.yaml",
    "seq_len": 32,
    "dtype": "bfloat16",
    "padding": True,
    "max_grad_norm": 0.5,
    "set": ["a=b", "c=d"],
    "gpu": "8GiB",
}


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_says_the_same_as_python(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"job.{suffix}"
    path.write_text(json.dumps(GIVEN) if suffix == "json" else yaml.safe_dump(GIVEN))
    assert read_spec(path) == Job(**GIVEN)
    assert read_spec(path).training_args == Path("sft.yaml")


def test_transformers_reads_the_same_class() -> None:
    words = ["--model", "Qwen/Qwen3-8B", "--training-args", "sft.yaml", "--seq_len", "32", "--dtype", "bfloat16"]
    words += ["--padding", "--max_grad_norm", "0.5", "--set", "a=b", "c=d", "--gpu", "8GiB"]
    (found,) = transformers.HfArgumentParser(Job).parse_args_into_dataclasses(words)
    assert found == Job(**GIVEN)


def test_numbers_may_be_texts_as_yaml_reads_some() -> None:
    assert Job(max_grad_norm="1e-3", seq_len="32").said() == {"max_grad_norm": 0.001, "seq_len": 32}
    assert Job(max_grad_norm="none").max_grad_norm == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_ln: 3", "'seq_ln' is not a field of a job; the nearest is seq_len"),
        ("seq-len: 3", "'seq-len' is not a field of a job; the nearest is seq_len"),
        ("seq_len: 0", "seq_len=0 must be at least 1"),
        ("seq_len: many", "seq_len='many' must be a whole number"),
        ("seq_len: true", "seq_len=True must be a number"),
        ("seq_len: none", "seq_len='none' must be a whole number"),
        ("max_grad_norm: 0", "max_grad_norm=0 must be above 0"),
        ("dtype: float8", "dtype='float8' is unknown; choose from auto, float32, bfloat16, float16"),
        ("padding: 1", "padding=1 must be true or false"),
        ("padding: 0", "padding=0 must be true or false"),
        ("set: a=b", "set='a=b' must be a list"),
        ("model: [a]", r"model=\['a'\] must be a text"),
        ("- seq_len", "holds no fields; write one in each line, such as seq_len: 4096"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^spec='{tmp_path}/job.yaml'.* ?{message}"):
        read_spec(tmp_path / "job.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^spec='.*job\.yaml' is not a file; name the YAML or JSON file"):
        read_spec(tmp_path / "job.yaml")


def test_names_of_transformers_and_trl_are_ours() -> None:
    theirs = Job("m", max_length=64, bf16=True, lora_r=8, optim="adamw_torch", load_in_4bit=True, use_rslora=True)
    ours = Job("m", seq_len=64, precision="bf16", lora_rank=8, optimizer="adamw-foreach", quantize="nf4")
    assert theirs == replace(ours, use_rslora=True)
    assert replace(theirs, seq_len=None, use_rslora=False).said() == {
        name: value for name, value in ours.said().items() if name != "seq_len"
    }
    with pytest.raises(ValueError, match=r"^lora_r=8 and lora_rank=4: name one of them$"):
        Job(lora_rank=4, lora_r=8)


def test_old_spellings_go_on_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="quantize=int8 is now spelled quantize=int8-llm"):
        assert Job(quantize="int8").quantize == "int8-llm"
    with pytest.warns(FutureWarning, match="base=resident is now spelled base=off"):
        assert Job(base="resident").base == "off"
