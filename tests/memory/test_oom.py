"""The out-of-memory report, with the error injected at each phase of a toy step on the CPU."""

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import hide_what_is_alive
from counted_allocator import FakeCounters
from oom_toys import DIM, Step, fail, out_of_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.memory import explain_oom
from hf_memopt.memory import oom as oom_module
from hf_memopt.memory.attribution import LiveTensors
from hf_memopt.units import format_bytes


@pytest.fixture(autouse=True)
def alone(small_heap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_what_is_alive(monkeypatch)


def report_of(action: Callable[[], Any], *args: Any, **options: Any) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught, explain_oom(*args, **options):
        action()
    (note,) = caught.value.__notes__
    return note


@pytest.mark.parametrize(
    ("failure", "phase", "module"),
    [
        ("forward", "forward", "1"),
        ("backward", "backward", ""),
        ("recompute", "backward", "1"),
        ("optimizer", "optimizer", ""),
        ("evaluation", "evaluation", "1"),
    ],
)
def test_the_phase_and_the_module_are_named(failure: str, phase: str, module: str) -> None:
    step = Step()
    report = report_of(lambda: step.fail(failure), step.model)
    first = report.splitlines()[0]
    assert first == f"Out-of-memory report: the {phase} phase{f', in {module}' if module else ''}"


def test_the_error_is_the_same_object_and_propagates_with_its_message() -> None:
    error = out_of_memory()

    def action() -> None:
        raise error

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB") as caught, explain_oom():
        action()
    assert caught.value is error
    assert error.args == ("CUDA out of memory. Tried to allocate 2.00 GiB.",)
    assert error.__cause__ is None
    assert error.__context__ is None


def test_largest_tensors_gather_repeated_layers() -> None:
    gc.collect()
    step = Step()
    report = report_of(lambda: step.fail("backward"), step.model)
    lines = re.findall(r"^ +\S+ \S+  (\d+) x (.*)$", report, flags=re.MULTILINE)
    assert ("3", f"({4 * DIM}, {DIM}) float32, optimizer state: *.up.weight exp_avg") in lines
    assert len(lines) == 10


def remedy_bytes(report: str) -> dict[str, str]:
    block = report.split("What each remedy would have saved, at most:\n")[1]
    return {name: size for size, name in re.findall(r"^ +(\S+ \S+)  ([a-z -]+):", block, flags=re.MULTILINE)}


def test_remedies_hold_what_they_would_have_saved() -> None:
    step = Step()
    step.model[0].requires_grad_(False)
    frozen_bytes = sum(parameter.nbytes for parameter in step.model[0].parameters())
    in_backward = remedy_bytes(report_of(lambda: step.fail("backward"), step.model))
    assert in_backward["frozen weights on the host"] == format_bytes(frozen_bytes)
    assert in_backward["activation offloading"] == in_backward["activation checkpointing"] != "0 B"
    assert in_backward["fused optimizer"] == "0 B"


def test_a_fused_optimizer_saves_in_the_optimizer_phase_only() -> None:
    step = Step()
    step.optimizer.param_groups[0]["foreach"] = True
    trained_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    live: list[LiveTensors] = []
    saved = {
        phase: next(remedy for remedy in oom_module.remedies(step.model, live, phase) if "fused" in remedy.name)
        for phase in ("optimizer", "backward")
    }
    assert saved["optimizer"].saved_bytes == trained_bytes
    assert saved["backward"].saved_bytes == 0
    step.optimizer.param_groups[0].update(foreach=None, fused=True)
    remedies = oom_module.remedies(step.model, live, "optimizer")
    assert next(remedy for remedy in remedies if "fused" in remedy.name).saved_bytes == 0


class NothingRuns(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} ran")


def test_the_report_runs_no_tensor_operation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_report = oom_module._report

    def watched(*args: Any) -> str:
        with NothingRuns():
            return make_report(*args)

    monkeypatch.setattr(oom_module, "_report", watched)
    step = Step()
    assert "Live tensors" in report_of(lambda: step.fail("backward"), step.model, output_dir=tmp_path)


def test_a_failing_report_is_logged_and_does_not_mask_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> str:
        raise ValueError("no report today")

    monkeypatch.setattr(oom_module, "_report", broken)
    error = out_of_memory()
    with pytest.raises(torch.OutOfMemoryError) as caught, explain_oom():
        raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    (record,) = caplog.records
    assert "the out-of-memory report failed" in record.getMessage()
    assert "no report today" in str(record.exc_info)


def test_an_unwritable_folder_does_not_mask_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(torch.OutOfMemoryError), explain_oom(output_dir=tmp_path / "file"):
        raise out_of_memory()
    assert "the out-of-memory report failed" in caplog.text


def test_nothing_is_kept_alive() -> None:
    step = Step()

    def action() -> weakref.ref[Tensor]:
        temporary = torch.ones(7)
        refs.append(weakref.ref(temporary))
        raise out_of_memory()

    refs: list[weakref.ref[Tensor]] = []
    try:
        with explain_oom(step.model):
            action()
    except torch.OutOfMemoryError as error:
        text = error.__notes__[0]
    assert "float32" in text
    assert refs[0]() is None


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(RuntimeError) as caught, explain_oom():
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
    assert not hasattr(caught.value, "__notes__")


def test_nested_contexts_report_once_and_decorating_works() -> None:
    @explain_oom()
    def action() -> None:
        with explain_oom():
            raise out_of_memory()

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            action()
        assert len(caught.value.__notes__) == 1


def test_files_are_written_where_asked(tmp_path: Path) -> None:
    step = Step()
    report = report_of(lambda: step.fail("forward"), step.model, output_dir=tmp_path / "new" / "run")
    written = (tmp_path / "new" / "run" / "out_of_memory_rank0.txt").read_text()
    assert report.startswith(written.rstrip())
    assert "no allocator snapshot, which needs CUDA" in report


@pytest.mark.parametrize("recorded", [False, True])
def test_a_snapshot_is_dumped_if_history_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    dumped: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: recorded)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dumped.append)
    report = report_of(fail, output_dir=tmp_path)
    assert dumped == ([str(tmp_path / "out_of_memory_rank0.pickle")] if recorded else [])
    assert ("memory_viz" in report) is recorded
    assert ("_record_memory_history(max_entries=100_000, stacks='python')" in report) is not recorded


def test_without_a_model_there_are_kinds_and_shapes() -> None:
    step = Step()
    report = report_of(lambda: step.fail("backward"))
    assert re.search(rf"\d+ x \({4 * DIM}, {DIM}\) float32, parameter$", report, flags=re.MULTILINE)
    assert report.startswith("Out-of-memory report: the backward phase\n")
    # Weights are no activations, though operations save them too.
    assert f"({4 * DIM}, {DIM}) float32, saved activation" not in report


def test_device_figures_come_from_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = FakeCounters(total_bytes=4 * 2**30)
    counters.move(3 * 2**30)
    counters.move(-(2**30))
    counters.elsewhere_bytes = 2**29
    monkeypatch.setattr(oom_module, "counters_for", lambda device: counters)
    (line,) = oom_module._device_lines(torch.device("cuda"))
    assert line == (
        "Of 4.00 GiB on cuda: 2.00 GiB in tensors, 1.00 GiB reserved beside them (0 B of it in pieces between "
        "tensors), 512.00 MiB used by others and by the device context, 512.00 MiB free."
    )
