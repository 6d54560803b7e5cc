"""Scripts that are recorded in this process. Whole runs of `verify`: commands/test_verify_command.py."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule

from hf_memopt.exactness.comparison import compare
from hf_memopt.exactness.recording import Phase, Recording

accelerate = LateModule("accelerate")
recorded_script = LateModule("hf_memopt.callbacks.recorded_script")
switches = LateModule("hf_memopt.callbacks.recorded_script")
transformers = LateModule("transformers")

TRAINER = """
import sys
import transformers
from offload_trainers import STEPS, decoder, examples
arguments = transformers.TrainingArguments(**{**STEPS, "save_strategy": "steps", "output_dir": sys.argv[1]})
transformers.Trainer(decoder(), arguments, train_dataset=examples(), eval_dataset=examples()[:2]).train()
raise RuntimeError("it trains on")
"""
LOOP = """
import sys
import torch
from accelerate import Accelerator
from offload_trainers import examples
from tiny_decoders import tiny_decoder
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=sys.argv[1])
model = tiny_decoder()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for row in examples()[:4]:
    with accelerator.accumulate(model):
        hidden = model.model(input_ids=row["input_ids"][None]).last_hidden_state
        accelerator.backward(model.lm_head(hidden).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def record(tmp_path: Path, record_command: Callable[..., Recording]) -> Callable[..., tuple[Recording, Path]]:
    """A function that records the text of a script; it returns the recording and the script's output folder."""

    def record(script: str, *words: str, **how: Any) -> tuple[Recording, Path]:
        output = tmp_path / "output"
        (tmp_path / "script.py").write_text(script)
        return record_command(str(tmp_path / "script.py"), *(words or (str(output),)), **how), output

    return record


def names(recording: Recording, phase: Phase) -> list[str]:
    return [place.name for place in recording.tensors if place.phase == phase and place.step == 1]


def test_a_trainer_is_recorded_for_two_steps_and_leaves_nothing_behind(record: Any) -> None:
    found, output = record(TRAINER)
    assert found.num_steps == 2
    assert names(found, "loss") == ["loss", "loss"]
    assert names(found, "gradient")[0] == "lm_head.weight"
    assert all(not name.startswith("module") for name in names(found, "weight"))
    assert set(names(found, "input")) >= {"input_ids", "labels"}
    assert found.has_dropout
    assert not output.exists()


@pytest.mark.parametrize(
    "texts",
    [
        ("gradient_checkpointing=true",),
        ("gradient_checkpointing=true", 'gradient_checkpointing_kwargs={"use_reentrant": true}'),
        ("offload=all", "offload_threshold_mb=0"),
    ],
)
@pytest.mark.sweep(share=0.3)
def test_switches_that_keep_every_bit(texts: tuple[str, ...], record: Any) -> None:
    plain, _ = record(TRAINER, texts=texts, is_switched=False)
    switched, _ = record(TRAINER, texts=texts)
    found = compare(plain, switched)
    assert found.verdict == "equal", found.first
    assert found.not_compared == []
    assert found.num_compared["gradient"] == 4 * len(set(names(plain, "gradient")))


def test_a_switch_that_changes_the_training_is_seen(record: Any) -> None:
    texts = ("learning_rate=2e-2",)
    plain, _ = record(TRAINER, texts=texts, is_switched=False)
    switched, _ = record(TRAINER, texts=texts)
    first = compare(plain, switched).first
    assert first is not None
    assert (first.place.step, first.place.phase) == (1, "setting")


def test_a_loop_with_an_accelerator_is_named_after_what_it_prepares(record: Any) -> None:
    found, _ = record(LOOP, "bf16", texts=("offload=off",))
    assert found.num_steps == 2
    assert names(found, "loss") == ["loss", "loss"]
    assert "model.layers.0.mlp.up_proj.weight" in names(found, "gradient")
    assert names(found, "input")[:2] == ["input_ids", "[0] (call 2)"]
    assert found.precision == "bfloat16"


def test_precision_is_that_of_the_accelerator(record: Any) -> None:
    found, _ = record(LOOP, "no")
    assert found.precision is None


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "pass"])
def test_a_script_that_ends_well(end: str, record: Any) -> None:
    found, _ = record(f"{LOOP}\n{end}", "no", steps=9)
    assert found.num_steps == 2


def test_a_script_that_fails(record: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        record("import sys; sys.exit(3)")
    with pytest.raises(RuntimeError, match="of the script"):
        record("raise RuntimeError('of the script')")
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


def test_seeds_are_set(record: Any, tmp_path: Path) -> None:
    draw = "import pathlib, random, sys, numpy, torch\n"
    draw += "drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]\n"
    draw += "pathlib.Path(sys.argv[1]).write_text(str(drawn))"
    drawn = []
    for _ in range(2):
        record(draw, str(tmp_path / "drawn"))
        drawn.append((tmp_path / "drawn").read_text())
        random.random(), np.random.rand(), torch.rand(1)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize(
    ("script", "texts", "complaint"),
    [
        (TRAINER, ("gradient_checkpoint=true",), "TrainingArguments has no such field; similar are gradient_check"),
        (LOOP, ("gradient_checkpointing=true",), "gradient_checkpointing=true reaches nothing: the script makes no"),
    ],
)
def test_a_switch_that_the_script_has_no_use_for(
    script: str, texts: tuple[str, ...], complaint: str, is_switched: bool, record: Any, tmp_path: Path
) -> None:
    with pytest.raises(switches.SwitchError, match=complaint):
        record(script, "no", texts=texts, is_switched=is_switched)
    assert complaint in recorded_script.mistake_file(tmp_path).read_text()
    assert not (tmp_path / "rank-0.json").exists()


def test_a_switch_that_the_script_has_on_already(record: Any) -> None:
    with pytest.raises(switches.SwitchError, match=r"learning_rate=1e-2: the script's TrainingArguments has that"):
        record(TRAINER, texts=("learning_rate=1e-2",), is_switched=False)


def test_offloading_that_moves_nothing_is_refused(record: Any) -> None:
    with pytest.raises(switches.SwitchError, match=r"offload=all moved no bytes: .*add --switch offload_thres"):
        record(TRAINER, texts=("offload=all",))


def test_torch_and_accelerate_are_put_back(record: Any) -> None:
    def seams() -> list[Any]:
        kernels = torch.are_deterministic_algorithms_enabled()
        classes = transformers.Trainer.__init__, accelerate.Accelerator.prepare, torch.nn.Module.__call__
        return [*classes, torch.autograd.backward, kernels]

    before = seams()
    record(LOOP, "no", texts=("offload=off",))
    assert seams() == before


BY_HAND = """
import torch
model = torch.nn.Linear(4, 4)
for step in range(100):
    for micro_batch in range(2):
        model(torch.ones(1, 4) * step).square().sum().backward()
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * each.grad
            each.grad = None
"""


def test_updates_by_hand_end_steps(record: Any) -> None:
    found, _ = record(BY_HAND)
    assert found.num_steps == 2
    assert names(found, "loss") == ["loss", "loss"]
    assert names(found, "weight") == ["weight", "bias"]


@pytest.mark.parametrize("text", ["offload=all", "selective_checkpointing=true", "base=file"])
def test_a_switch_that_reaches_no_model_is_refused(text: str, record: Any) -> None:
    complaint = f"switch={text} reaches nothing: the script makes no Trainer and prepares no model .*offload_context"
    with pytest.raises(switches.SwitchError, match=complaint):
        record(BY_HAND, texts=(text,))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("base=file", "base reaches nothing: no model of the script has frozen"), ("frozen=swap", "Trainers alone")],
)
def test_a_switch_that_does_nothing_in_a_loop_is_refused_there(text: str, complaint: str, record: Any) -> None:
    with pytest.raises(switches.SwitchError, match=complaint):
        record(LOOP, "no", texts=(text,))


def test_trained_weights_of_a_loop_stream_without_changing_it(record: Any) -> None:
    want, _ = record(LOOP, "no")
    found, _ = record(LOOP, "no", texts=("base=file", "trained=true"))
    assert names(found, "weight") == names(want, "weight") != []
    assert not compare(want, found).differences


def test_an_optimizer_with_another_home_is_recorded_as_the_plain_one(record: Any) -> None:
    want, _ = record(LOOP, "no")
    found, _ = record(LOOP, "no", texts=("optimizer_home=host",))
    assert names(found, "optimizer") == names(want, "optimizer") != []
    assert not compare(want, found).differences


def test_a_home_that_reaches_no_optimizer_is_refused(record: Any) -> None:
    script = LOOP.replace("model, optimizer = ", "optimizer = torch.optim.AdamW(model.parameters()); model = ")
    script = script.replace("prepare(model, torch.optim.AdamW(model.parameters()))", "prepare(model)")
    with pytest.raises(switches.SwitchError, match=r"switch=optimizer_home=host reaches no optimizer that is stepped"):
        record(script, "no", texts=("optimizer_home=host",))


def test_a_script_that_launches_another_one_is_refused(record: Any) -> None:
    script = "from accelerate.commands.launch import launch_command\nlaunch_command(None)"
    with pytest.raises(switches.SwitchError, match=r"processes that are not recorded; name that one"):
        record(script)


@pytest.mark.parametrize("text", ["env:MARK=on", "torch:_functorch.config.activation_memory_budget=1.0"])
def test_a_switch_that_changes_nothing_is_refused(text: str, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", "on")
    with pytest.raises(switches.SwitchError, match=f"switch={text}: the plain run has that value already"):
        record(LOOP, "no", texts=(text,), is_switched=False)


def test_autocast_of_the_accelerator_is_off_in_float32(record: Any) -> None:
    found, _ = record(LOOP, "bf16", in_float32=True)
    bits = [each.num_bits for place, each in found.tensors.items() if place.phase == "gradient"]
    assert found.precision == "bfloat16"
    assert sorted(bits)[len(bits) // 2] > 20
