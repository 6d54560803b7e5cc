"""A step of every model type that transformers has for a task here: estimated, or refused in a known line.

`model_types.txt` lists them all, and after a "|" the reason for a refusal, as the error gives it.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers_toys
from late_imports import LateModule

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

tasks = LateModule("hf_memopt.planning.models.tasks")
tiny_configurations = LateModule("tiny_configurations")

# Their processors choose the size of images.
SIZED = ("internvl", "idefics3", "smolvlm", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# With room for images, and the only lengths for which these have positions.
LENGTHS = {"image-text-to-text": 2000, "perceiver": 2048}


class Case(NamedTuple):
    task: str
    model_type: str
    reason: str

    @property
    def id(self) -> str:
        return f"{self.task}-{self.model_type}"


def listed(line: str) -> Case:
    name, _, reason = line.partition(" | ")
    return Case(*name.split(), reason)


CASES = [listed(line) for line in Path(__file__).with_name("model_types.txt").read_text().splitlines()]


def class_of(case: Case) -> str:
    found = tasks.TASKS[case.task].auto._model_mapping._model_mapping[case.model_type]
    return str(found[0] if isinstance(found, tuple) else found)


def estimated(case: Case, folder: Path) -> MemoryEstimate:
    """Estimate a step as the command does; all in the child, which drops the modules of the model when it ends."""
    write, workload, class_name = tiny_configurations.tiny_configuration, transformers_toys.workload_of, class_of(case)

    def run() -> MemoryEstimate:
        write(case.model_type, class_name).save_pretrained(folder)
        model = workload(
            str(folder),
            task=case.task,
            seq_len=LENGTHS.get(case.model_type, LENGTHS.get(case.task, 32)),
            image_size="112x112" if case.task == "image-text-to-text" and case.model_type in SIZED else None,
            batch_size=2,
            dtype="float32",
            precision="bf16",
            checkpointing="none",
        )
        return simulate_step(model.as_given())

    return run_isolated(run)


@pytest.mark.sweep(share=1 / 100)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.filterwarnings("ignore")
def test_a_model_type_is_estimated_or_refused(case: Case, tmp_path: Path) -> None:
    if not case.reason:
        found = estimated(case, tmp_path)
        assert found.peak_bytes > found.breakdown["parameters"] > 0
        return
    with pytest.raises(ValueError, match=re.escape(case.reason)) as caught:
        estimated(case, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.canary
def test_the_list_is_complete() -> None:
    """Check the model types of a new release of transformers; correct model_types.txt."""
    installed = {
        (name, model_type)
        for name, task in tasks.TASKS.items()
        if name != "denoising"
        for model_type in task.auto._model_mapping._model_mapping
    }
    # Models for texts alone can be contrastive; `AutoModel` has those for images and sound, too.
    texts = {model_type for task, model_type in installed if task in ("masked", "causal")}
    expected = {(task, model_type) for task, model_type in installed if task != "contrastive" or model_type in texts}
    assert {(case.task, case.model_type) for case in CASES} == expected
