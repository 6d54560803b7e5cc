import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from gradients import equal
from late_imports import LateModule
from offload_trainers import decoder, weights

from hf_memopt.weights.base import streamed_weights_of

callbacks = LateModule("hf_memopt.callbacks")
transformers = LateModule("transformers")

# Offloads even the tiny decoder's tensors.
TINY: dict[str, Any] = {"offload_threshold_mb": 0.0, "cpu_copies": True}
YAML = "output_dir: out\nlearning_rate: 0.01\nbudget_gib: 6\nmemory_log: false\npin_memory: false\n"
READ = {"budget_gib": 6.0, "memory_log": False, "pin_memory": False}


def test_hf_argument_parser_reads_flags_and_yaml_beside_training_arguments(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, callbacks.MemoptArguments))
    words = ["--output_dir=out", "--learning_rate=0.01", "--budget_gib=6", "--no_memory_log", "--pin_memory=false"]
    (tmp_path / "run.yaml").write_text(YAML)
    for training, memopt in (parser.parse_args_into_dataclasses(words), parser.parse_yaml_file(tmp_path / "run.yaml")):
        assert training.learning_rate == 0.01
        assert memopt == callbacks.MemoptArguments(**READ)


def test_trl_parser_reads_yaml_beside_a_config_of_trl(tmp_path: Path) -> None:
    from trl import SFTConfig, TrlParser

    (tmp_path / "run.yaml").write_text(YAML)
    parser = TrlParser([SFTConfig, callbacks.MemoptArguments])
    words = ["--config", str(tmp_path / "run.yaml"), "--offload_threshold_mb", "1", "--bf16", "false"]
    training, memopt = parser.parse_args_and_config(words)
    assert training.learning_rate == 0.01
    assert memopt == callbacks.MemoptArguments(**READ, offload_threshold_mb=1.0)


def test_no_field_has_the_name_of_another_option() -> None:
    import trl

    ours = {field.name for field in dataclasses.fields(callbacks.MemoptArguments)}
    kinds = [transformers.Seq2SeqTrainingArguments, trl.ModelConfig, trl.ScriptArguments]
    kinds += [getattr(trl, name) for name in dir(trl) if name.endswith("Config")]
    kinds = [kind for kind in kinds if inspect.isclass(kind) and dataclasses.is_dataclass(kind)]
    assert len(kinds) > 6
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} & ours == set()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"offload": "off"},
        {"budget_gib": 0.5, "prefetch_ahead": 0, "leak_check": True},
        {"pin_memory": False, "memory_log": False, "host_budget_gib": 3.0, "max_slowdown": 1e-9},
        {"skip": ["visual"], "offload": "all"},
        {"disk": ".", "disk_budget_gib": 2.0},
        {"base": "file", "base_budget_gib": 1.5, "disk": "."},
        {"optimizer_home": "file", "disk": "."},
        {"skip": ["*.visual", "LlamaMLP"], "leak_check": True},
    ],
)
def test_a_text_gives_what_it_was_made_of(given: dict[str, Any]) -> None:
    arguments = callbacks.MemoptArguments(**given)
    assert callbacks.MemoptArguments.from_text(arguments.to_text()) == arguments
    assert arguments.to_text().count("=") == len(given)


def test_a_folder_may_have_spaces_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "my disk").mkdir()
    arguments = callbacks.MemoptArguments(disk=str(tmp_path / "my disk"), skip=["visual", "lm_head"])
    assert callbacks.MemoptArguments.from_text(arguments.to_text()) == arguments


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"offload": "some"}, "offload='some' is unknown; choose from off, auto"),
        ({"base": "tape"}, "base='tape' is unknown; choose from off, auto, host, file"),
        ({"base_budget_gib": 1.0}, "base_budget_gib=1.0 needs base=auto, host or file, and base=off"),
        ({"base": "host", "base_budget_gib": -1.0}, "base_budget_gib=-1.0 must be at least 0"),
        ({"frozen": "swap", "frozen_home": "tape"}, "frozen_home='tape' is unknown; choose from host, file"),
        ({"frozen_home": "file"}, "frozen_home=file needs frozen=auto, swap or stream, and frozen=off"),
        ({"frozen": "paged"}, "frozen='paged' is unknown; choose from off, auto, resident, swap, stream"),
        ({"optimizer_home": "tape"}, "optimizer_home='tape' is unknown; choose from off, host, file"),
        ({"budget_gib": -1.0}, "budget_gib=-1.0 must be at least 0"),
        ({"prefetch_ahead": 1.5}, "prefetch_ahead=1.5 must be a whole number"),
        ({"budget_gib": 1.0, "offload": "all"}, "budget_gib=1.0 needs offload=auto"),
        ({"disk": "missing"}, "disk='missing' is no folder"),
        ({"disk_budget_gib": 1.0}, "disk_budget_gib=1.0 needs disk"),
        ({"disk": ".", "disk_budget_gib": -1.0}, "disk_budget_gib=-1.0 must be at least 0"),
        ({"skip": "visual"}, "skip='visual' must be a sequence of modules, classes and name patterns"),
        ({"skip": [""]}, "skip has '', which is no module"),
        ({"memory_report": True, "memory_log": False}, "memory_report=True .*switch memory_log on"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        callbacks.MemoptArguments(**given)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bugdet_gib=6", "'bugdet_gib=6' sets no field; there are offload, budget_gib"),
        ("budget=6", "'budget=6' sets no field"),  # nothing is abbreviated
        ("budget_gib=six", "invalid float value: 'six'"),
        ("offload=some", "invalid choice: 'some'"),
    ],
)
def test_a_mistake_in_the_variable_names_it(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"HF_MEMOPT='{text}': .*{complaint}"):
        callbacks.MemoptArguments.from_text(text)


def test_a_trainer_is_attached_to_with_the_plain_runs_weights(make: Any, tmp_path: Path) -> None:
    plain = make()
    plain.train()
    trainer = make()
    memopt = callbacks.MemoptArguments(**TINY, leak_check=True, memory_report=True)
    handle = memopt.attach(trainer)
    trainer.train()
    assert equal(weights(trainer), weights(plain))
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == [
        entry["loss"] for entry in plain.state.log_history if "loss" in entry
    ]
    (loss,) = (each for each in trainer.callback_handler.callbacks if hasattr(each, "offloader"))
    assert loss.offloader.stats.bytes_moved > 0
    assert any(isinstance(each, callbacks.LeakDetectionCallback) for each in trainer.callback_handler.callbacks)
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "Memory and time of out" in page
    handle.remove()
    assert {"train", "compute_loss_context_manager"} & set(vars(trainer)) == set()
    assert not any("hf_memopt" in type(each).__module__ for each in trainer.callback_handler.callbacks)


def test_a_base_streams_with_its_budget_until_it_is_removed(make: Any, tmp_path: Path) -> None:
    model: Any = decoder()
    model.model.layers[0].requires_grad_(False)
    trainer = make(model)
    memopt = callbacks.MemoptArguments(offload="off", base="file", base_budget_gib=0.25, disk=str(tmp_path))
    handle = memopt.attach(trainer)
    trainer.train()
    weights_of_base: Any = streamed_weights_of(model)
    assert weights_of_base.report().resident["within the budget"] > 0
    handle.remove()
    assert streamed_weights_of(model) is None


def test_everything_switched_off_attaches_nothing(make: Any) -> None:
    trainer = make()
    before = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    callbacks.MemoptArguments(offload="off", memory_log=False).attach(trainer)
    assert (set(vars(trainer)), trainer.callback_handler.callbacks) == before


def test_attach_alone_offloads_by_plan_and_watches_memory(make: Any) -> None:
    trainer = make()
    callbacks.attach(trainer)
    assert {"train", "compute_loss_context_manager"} <= set(vars(trainer))
    (loss,) = (each for each in trainer.callback_handler.callbacks if hasattr(each, "offloader"))
    assert loss.offloader.mode == "auto"
    assert any(isinstance(each, callbacks.MemoryLoggingCallback) for each in trainer.callback_handler.callbacks)


def test_a_run_that_logs_nothing_ends_well_without_a_report(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(logging_steps=100)
    callbacks.MemoptArguments(memory_report=True).attach(trainer)
    trainer.train()
    assert "no report: no memory was logged, with logging_steps=100" in caplog.text
    assert not (tmp_path / "out" / "report").exists()


def test_a_report_without_matplotlib_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"memory_report=True needs matplotlib"):
        callbacks.MemoptArguments(offload="off", memory_report=True).attach(make())
