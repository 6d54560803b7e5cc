"""Tests of the record that a Trainer's run leaves for its page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from offload_trainers import everything

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.report import read_run, tables
from hf_memopt.report.offloading import OFFLOADING_FILE, OffloadingRecord, in_words

callbacks = LateModule("hf_memopt.callbacks")

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


def test_a_run_without_offloading_has_no_stats(make: Make) -> None:
    _, record = trained(make, None)
    assert record.stats is None
    assert record.facts


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


def test_a_threshold_above_all_is_named_with_the_largest_tensor(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    offloader = planned(offload_threshold_mb=10.0)
    trained(make, offloader)
    assert "no saved tensor reaches offload_threshold_mb=10; the largest has " in offloader.report().note
    assert "moved nothing: no saved tensor reaches offload_threshold_mb=10; the largest has " in caplog.text
