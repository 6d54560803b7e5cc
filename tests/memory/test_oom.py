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
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_memopt.memory import explain_oom
from hf_memopt.memory import oom as oom_module
from hf_memopt.memory.attribution import (
    BUFFER,
    GRADIENT,
    OPTIMIZER_STATE,
    PARAMETER,
    SAVED,
    LiveTensors,
    live_optimizers,
    live_tensors,
)
from hf_memopt.units import format_bytes

DIM, BATCH = 24, 6


@pytest.fixture(autouse=True)
def alone(small_heap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_what_is_alive(monkeypatch)


class NoMoreMemory(torch.autograd.Function):
    """Passes its input on, and fails when its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise out_of_memory()


class Block(nn.Module):
    """A residual block that can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)
        self.register_buffer("scale", torch.ones(DIM))
        self.fails_at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if self.fails_at == "forward":
            raise out_of_memory()
        if self.fails_at == "backward":
            hidden = NoMoreMemory.apply(hidden)
        return x + self.down(hidden) * self.scale


class Step:
    """Training steps of three blocks, the middle one of which fails where it is told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block(), Block())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(BATCH, DIM)
        self.run()

    def run(self) -> None:
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fail(self, where: str) -> None:
        getattr(self, f"_fail_in_{where}")()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def _fail_in_forward(self) -> None:
        self.model[1].fails_at = "forward"
        self.run()

    def _fail_in_backward(self) -> None:
        self.model[1].fails_at = "backward"
        self.run()

    def _fail_in_recompute(self) -> None:
        loss = checkpoint(self.model, self.x, use_reentrant=False).sum()
        self.model[1].fails_at = "forward"
        loss.backward()

    def _fail_in_optimizer(self) -> None:
        self.model(self.x).sum().backward()
        self.optimizer.register_step_pre_hook(fail)
        self.optimizer.step()

    def _fail_in_evaluation(self) -> None:
        self.model[1].fails_at = "forward"
        self.evaluate()


def fail(*args: Any) -> None:
    raise out_of_memory()


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


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


def live_by_kind(model: nn.Module) -> dict[str, int]:
    totals: dict[str, int] = {}
    for group in live_tensors(model, "cpu"):
        totals[group.kind] = totals.get(group.kind, 0) + group.num_bytes
    return totals


def test_kinds_are_complete_and_exact_to_the_byte() -> None:
    step = Step()
    parameter_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    before = live_by_kind(step.model)
    loss = step.model(step.x).sum()
    after = live_by_kind(step.model)
    assert after[PARAMETER] == parameter_bytes
    assert after[BUFFER] == 3 * DIM * 4
    # Two moments of each parameter, and a count of steps in four bytes.
    assert after[OPTIMIZER_STATE] == 2 * parameter_bytes + 4 * len(list(step.model.parameters()))
    assert GRADIENT not in after
    # Each block: input and statistics of the norm, what up gets, what tanh gives (which down gets), what scale gets.
    per_block = BATCH * (DIM + 1 + 1 + DIM + 4 * DIM) * 4
    assert SAVED not in before
    assert after[SAVED] == 3 * per_block
    loss.backward()
    assert live_by_kind(step.model)[GRADIENT] == parameter_bytes
    owners = {group.owner for group in live_tensors(step.model, "cpu") if group.kind == GRADIENT}
    assert owners == {name for name, _ in step.model.named_parameters()}


def test_saved_activations_are_named_after_their_modules() -> None:
    step = Step()
    loss = step.model(step.x).sum()
    owners = {group.owner: group for group in live_tensors(step.model, "cpu") if group.kind == SAVED}
    hidden = owners["1.down (Addmm)"] if "1.down (Addmm)" in owners else owners["after 1.up (Tanh)"]
    assert (hidden.shape, hidden.num_bytes) == ((BATCH, 4 * DIM), BATCH * 4 * DIM * 4)
    assert any(owner.startswith("2.norm (NativeLayerNorm)") for owner in owners)
    assert loss.requires_grad


def test_frozen_layers_are_recognised_by_the_weights_that_they_save() -> None:
    base, adapter = nn.Linear(DIM, DIM).requires_grad_(False), nn.Linear(DIM, DIM)
    model = nn.ModuleDict({"adapter": adapter, "base": base})
    y = base(torch.tanh(adapter(torch.randn(BATCH, DIM))))
    z = (y * y).sum()
    owners = {group.owner for group in live_tensors(model, "cpu") if group.kind == SAVED}
    assert {"after adapter (Tanh)", "after base (Mul)"} <= owners
    assert z.requires_grad


def test_a_first_layer_is_recognised_by_its_input_weight() -> None:
    # Its input needs no gradient, so it saves that and not its weight.
    model = nn.Sequential(nn.Linear(DIM, 3, bias=False))
    y = model(torch.randn(BATCH + 1, DIM))
    saved = [group for group in live_tensors(model, "cpu") if group.kind == SAVED and group.shape == (BATCH + 1, DIM)]
    assert [group.owner for group in saved] == ["0 (Mm)"]
    assert y.requires_grad


def test_other_devices_do_not_count() -> None:
    step = Step()
    assert live_tensors(step.model, "cpu")
    assert live_tensors(step.model, "cuda") == []


def test_what_a_pack_hook_wrapped_is_found_without_unpacking() -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def unpack(box: Box) -> Tensor:
        raise AssertionError("unpacked")

    x = torch.randn(BATCH, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Box, unpack):
        y = torch.tanh(x * 2)
    saved = [group for group in live_tensors(None, "cpu") if group.kind == SAVED and group.shape == (BATCH, DIM)]
    assert any(group.owner == "(Tanh)" for group in saved)
    assert y.requires_grad


def test_largest_tensors_gather_repeated_layers() -> None:
    gc.collect()
    step = Step()
    report = report_of(lambda: step.fail("backward"), step.model)
    lines = re.findall(r"^ +\S+ \S+  (\d+) x (.*)$", report, flags=re.MULTILINE)
    assert ("3", f"({4 * DIM}, {DIM}) float32, optimizer state: *.up.weight exp_avg") in lines
    assert len(lines) == 10


def lever_bytes(report: str) -> dict[str, str]:
    block = report.split("What each remedy would have saved, at most:\n")[1]
    return {name: size for size, name in re.findall(r"^ +(\S+ \S+)  ([a-z -]+):", block, flags=re.MULTILINE)}


def test_levers_hold_what_they_would_have_saved() -> None:
    step = Step()
    step.model[0].requires_grad_(False)
    frozen_bytes = sum(parameter.nbytes for parameter in step.model[0].parameters())
    in_backward = lever_bytes(report_of(lambda: step.fail("backward"), step.model))
    assert in_backward["frozen weights on the host"] == format_bytes(frozen_bytes)
    assert in_backward["activation offloading"] == in_backward["activation checkpointing"] != "0 B"
    assert in_backward["fused optimizer"] == "0 B"


def test_a_fused_optimizer_saves_in_the_optimizer_phase_only() -> None:
    step = Step()
    step.optimizer.param_groups[0]["foreach"] = True
    trained_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    live: list[LiveTensors] = []
    saved = {
        phase: next(lever for lever in oom_module.levers(step.model, live, phase) if "fused" in lever.name)
        for phase in ("optimizer", "backward")
    }
    assert saved["optimizer"].saved_bytes == trained_bytes
    assert saved["backward"].saved_bytes == 0
    step.optimizer.param_groups[0].update(foreach=None, fused=True)
    levers = oom_module.levers(step.model, live, "optimizer")
    assert next(lever for lever in levers if "fused" in lever.name).saved_bytes == 0


class WrappedOptimizer(torch.optim.Optimizer):
    """As accelerate's: an optimizer by type, with the groups and the state of the one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


def test_a_wrapped_optimizer_counts_once() -> None:
    step = Step()
    wrapped = WrappedOptimizer(step.optimizer)
    assert [one for one in live_optimizers() if one.param_groups is wrapped.param_groups] in (
        [wrapped],
        [step.optimizer],
    )


class NothingRuns(TorchDispatchMode):
    """Fails at any tensor operation."""

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
    # Operations save weights too, which makes them no activations.
    assert f"({4 * DIM}, {DIM}) float32, saved activation" not in report


def test_wrapped_tensors_count_as_what_they_wrap() -> None:
    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.randn(1000), torch.randn(1000)))

    model = Sharded()
    groups = [group for group in live_tensors(model, "cpu") if group.owner == "weight"]
    assert [(group.kind, group.count, group.num_bytes) for group in groups] == [(PARAMETER, 2, 2 * 4000)]
    assert not [group for group in live_tensors(None, "cpu") if group.kind == PARAMETER and group.shape == (1000,)]


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
