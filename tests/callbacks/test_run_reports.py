"""Tests of the record that a Trainer's run leaves for its page, and of the settings that it suggests."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from offload_trainers import decoder, everything

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.report import read_run, tables
from hf_memopt.report.offloading import OFFLOADING_FILE, OffloadingRecord, in_words

callbacks = LateModule("hf_memopt.callbacks")
arguments = LateModule("hf_memopt.callbacks.arguments")
next_settings = LateModule("hf_memopt.callbacks.next_settings")
switches = LateModule("hf_memopt.callbacks.switches")

pytestmark = pytest.mark.usefixtures("quick_plans")

Make = Callable[..., Any]


def trained(make: Make, offloader: ActivationOffloader | None, **options: Any) -> tuple[Any, OffloadingRecord]:
    trainer = make()
    callbacks.attach(trainer, offloader=offloader, **options)
    trainer.train()
    return trainer, OffloadingRecord.read(Path(trainer.args.output_dir) / OFFLOADING_FILE)


def planned(**options: Any) -> ActivationOffloader:
    return ActivationOffloader(**{"offload_threshold_mb": 0.0005, "copier": SyncCopier(), **options})


def test_the_record_has_the_offloaders_figures_and_the_page_shows_them(make: Make) -> None:
    offloader = planned(budget_gib=0.0001)
    trainer, record = trained(make, offloader, memory_report=True)
    assert record.stats is not None
    assert record.stats.bytes_moved == offloader.stats.bytes_moved > 0
    assert max(record.over_pass.held) == offloader.stats.measured_peak_gib * 2**30
    assert [plan.summary for plan in record.plans] == [each.plan.summary() for each in offloader.report().plans]
    folder = Path(trainer.args.output_dir)
    page = (folder / "report" / "report.html").read_text()
    assert all(phrase in page for phrase in in_words(record.stats))
    assert record.plans[0].summary in page
    run = read_run(folder)
    assert run.losses_by == "step"
    assert [step for step, _ in run.losses["training"]] == [2, 4, 6]
    assert "if all were kept" in tables.headlines(run)[0]
    trainer.create_model_card()
    card = (folder / "README.md").read_text()
    assert all(phrase in card for phrase in in_words(record.stats))
    assert record.plans[0].summary in card
    assert all(f"| {name} | {fact} |" in card for name, fact in record.facts.items())


def test_bytes_on_a_disk_are_shown(make: Make, tmp_path: Path) -> None:
    _, record = trained(make, ActivationOffloader(mode="all", offload_threshold_mb=0.0005, disk=tmp_path))
    assert record.stats is not None
    assert record.stats.disk_bytes_written > 0
    assert any("moved to the disk" in phrase for phrase in in_words(record.stats))
    assert record.note == "mode='all' makes no plan"


def test_a_run_without_offloading_is_told_to_switch_it_on(make: Make) -> None:
    _, record = trained(make, None)
    assert record.stats is None
    assert record.advice == [("ActivationOffloader(mode='auto', disk='.')", "no activations were offloaded")]


def test_an_earlier_runs_record_goes_when_training_begins(make: Make) -> None:
    trainer, _ = trained(make, everything())
    trainer.args.logging_steps = 100  # nothing is logged, so that nothing is written
    callbacks_of = trainer.callback_handler.callbacks
    assert any(type(each).__name__ == "RunReports" for each in callbacks_of)
    record = Path(trainer.args.output_dir) / OFFLOADING_FILE
    seen = []
    trainer.add_callback(_at_step_begin(lambda: seen.append(record.exists())))
    trainer.train()
    assert seen[0] is False


def _at_step_begin(call: Callable[[], object]) -> Any:
    transformers = LateModule("transformers")

    class AtStepBegin(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            call()

    return AtStepBegin()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"copier": None}, "ActivationOffloader(disk='.', ", id="a CPU without a copier"),
        pytest.param(
            {"offload_threshold_mb": 10.0}, "ActivationOffloader(offload_threshold_mb=0.0", id="nothing large enough"
        ),
        pytest.param({"budget_gib": 1.0}, "ActivationOffloader(budget_gib=", id="everything kept"),
        pytest.param({"mode": "all"}, "ActivationOffloader(mode='auto', budget_gib=", id="no plan"),
    ],
)
def test_the_first_advice_follows_from_the_figures(make: Make, options: dict[str, Any], expected: str) -> None:
    _, record = trained(make, planned(**options))
    assert record.advice[0][0].startswith(expected)


def test_a_slow_plan_is_told_to_checkpoint_or_to_take_more_and_a_quick_one_to_take_less(make: Make) -> None:
    offloader = planned(budget_gib=0.0001)
    trainer, _ = trained(make, offloader)
    for slowdown, expected in (
        (0.2, ["hf_memopt.attach(trainer, selective_checkpointing=True)", "ActivationOffloader(budget_gib=0.00015, "]),
        (0.03, []),
        (0.0, ["ActivationOffloader(budget_gib="]),
    ):
        plan = next(iter(offloader.report().plans)).plan
        object.__setattr__(plan, "predicted_step_s", (1 + slowdown) * plan.plain_step_s)
        found = next_settings.advice(offloader, trainer.model, "cpu", {}, base_streams=False, is_selective=False)
        assert len(found) == len(expected)
        assert all(setting.startswith(begin) for (setting, _), begin in zip(found, expected, strict=True))


def test_heavy_frozen_weights_and_fragmentation_are_named() -> None:
    model = decoder().requires_grad_(False)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    figures = {"memory/peak_allocated_gib": 2 * num_bytes / 2**30, "memory/fragmentation_gib": num_bytes / 2**30}
    found = next_settings.advice(None, model, "cuda", figures, base_streams=False, is_selective=False)
    settings = [setting for setting, _ in found]
    assert settings == [
        "ActivationOffloader(mode='auto')",
        "hf_memopt.attach(trainer, base='auto')",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    ]
    streamed = next_settings.advice(None, model, "cuda", figures, base_streams=True, is_selective=False)
    assert len(streamed) == len(settings) - 1


def test_under_launch_advice_is_the_whole_command_and_verify_takes_its_switches(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "budget_gib=0.0001,offload_threshold_mb=0.0005,cpu_copies=True,skip=lm_head visual,memory_report"
    rest = "--mixed_precision bf16 -- train.py --name 'two words'"
    monkeypatch.setenv("HF_MEMOPT", given)
    monkeypatch.setenv("HF_MEMOPT_LAUNCHED", rest)
    _, record = trained(make, planned(budget_gib=0.0001))
    *following, (verify, _) = record.advice
    for command, _ in following:
        assert command.startswith("hf-memopt launch ")
        assert command.endswith(rest)
        words = shlex.split(command.removesuffix(rest))[2:]
        found, others = arguments.MemoptArguments.from_words(words)
        assert others == []
        assert found.cpu_copies
        assert found.skip == ["lm_head", "visual"]
    assert verify.endswith(rest)
    words = shlex.split(verify.removesuffix(rest))[2:]
    assert words[::2] == ["--switch"] * (len(words) // 2)
    memopt = switches.Switches.from_texts(words[1::2]).make_memopt()
    assert (memopt.offload, memopt.budget_gib, memopt.skip) == ("auto", 0.0001, ["lm_head", "visual"])


def test_advice_keeps_the_other_options_and_moves_something_at_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    _, record = trained(make, ActivationOffloader())
    assert "moved nothing" in caplog.text
    (_, first_reason), (setting, _) = record.advice
    assert "the largest saved tensor has " in first_reason
    advised = eval(setting)
    _, record = trained(make, advised)
    assert record.stats is not None
    assert record.stats.measured_peak_gib is not None
    assert "copier=SyncCopier()" in record.advice[0][0]
    assert "offload_threshold_mb=" in record.advice[0][0]


def test_a_threshold_above_all_is_named_with_the_largest_tensor(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    offloader = planned(offload_threshold_mb=10.0)
    trained(make, offloader)
    assert "no saved tensor reaches offload_threshold_mb=10; the largest has " in offloader.report().note
    assert "moved nothing: no saved tensor reaches offload_threshold_mb=10; the largest has " in caplog.text
