import copy
import dataclasses
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from frozen_bases import MODES
from late_imports import LateModule
from teacher_toys import Network
from torch import Tensor, nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights import OffloadedTeacher

accelerate = LateModule("accelerate")


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_the_next_visit_is_right_after_a_fault_in_any_forward(
    network: Network, x: Tensor, error: type[BaseException]
) -> None:
    want = network(x)
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=AdversarialCopier())
    for child in network.children():

        def fail(*_: object) -> None:
            raise error("injected")

        handle = child.register_forward_pre_hook(fail)
        with pytest.raises(error, match="injected"), teacher.onload() as module:
            module(x)
        handle.remove()
        assert teacher.report().device_bytes == 0
        with teacher.onload() as module:
            assert torch.equal(module(x), want)


WRITES = {
    "itself": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "detached": lambda weight: weight.detach().mul_(2),
    "bound": lambda weight: setattr(weight, "data", weight.data * 2),
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", ["swap", "stream", "resident"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.sweep(share=0.15)
def test_a_written_weight_is_kept_or_an_error(
    network: Network, x: Tensor, mode: Any, write: Callable[[Any], Any], home: Any, context: Any, tmp_path: Path
) -> None:
    plain = copy.deepcopy(network).requires_grad_(False)
    disk = tmp_path if home == "file" else None
    teacher = OffloadedTeacher(network, device="cpu", mode=mode, home=home, copier=SyncCopier(), disk=disk)
    weight, its = next(network.parameters()), next(plain.parameters())
    with context():
        with nullcontext() if mode == "resident" else pytest.raises(RuntimeError, match="was written in a visit"):
            with teacher.onload():
                write(weight)
        if mode == "resident":
            write(its)
        with teacher.onload() as module:
            assert torch.equal(module(x), plain(x))
    write(weight)
    write(its)
    is_kept = home == "host" or mode == "resident"
    with nullcontext() if is_kept else pytest.raises(RuntimeError, match="was written between visits"):
        with teacher.onload() as module:
            assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_a_write_is_an_error_after_an_exception_too(network: Network, mode: Any, home: Any, tmp_path: Path) -> None:
    disk = tmp_path if home == "file" else None
    teacher = OffloadedTeacher(network, device="cpu", mode=mode, home=home, copier=SyncCopier(), disk=disk)
    with suppress(KeyboardInterrupt), torch.no_grad(), teacher.onload() as module:
        next(module.parameters()).mul_(2)
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="was written in a visit"), teacher.onload():
        pass
    with teacher.onload():
        pass
    network.double()
    with pytest.raises(RuntimeError, match=r"was (cast|written)"), teacher.onload():
        pass


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_arrays_outlive_visits(network: Network, x: Tensor, mode: Any, home: Any, tmp_path: Path) -> None:
    plain = copy.deepcopy(network)
    disk = tmp_path if home == "file" else None
    teacher = OffloadedTeacher(network, device="cpu", mode=mode, home=home, copier=SyncCopier(), disk=disk)
    found = []
    for _ in range(3):
        with teacher.onload() as module:
            found.append(next(module.parameters()).detach().numpy())
            assert torch.equal(module(x), plain(x))
    want = next(plain.parameters()).detach()
    assert all(torch.equal(torch.from_numpy(each.copy()), want) for each in found)


def test_nested_visits_leave_once(network: Network, x: Tensor) -> None:
    want = network(x)
    copier = AdversarialCopier()
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=copier)
    with teacher.onload() as outer:
        with teacher.onload() as inner:
            assert inner is outer
        assert torch.equal(outer(x), want)
    assert copier.bytes_to_device == teacher.report().host_bytes


def test_the_allocator_is_left_alone(network: Network, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise AssertionError("empty_cache was called")

    monkeypatch.setattr(torch.cuda, "empty_cache", forbidden)
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", forbidden)
    monkeypatch.setattr(torch.accelerator, "empty_cache", forbidden)
    with OffloadedTeacher(network, device="cpu", mode="swap", copier=SyncCopier()).onload() as module:
        module(x)


def test_dtype_casts_parameters_but_no_buffers(network: Network) -> None:
    frequencies = network.frequencies.clone()
    network.norm._keep_in_fp32_modules = ["norm"]
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", dtype=torch.bfloat16, copier=SyncCopier())
    with teacher.onload() as module:
        assert module.embed.weight.dtype == torch.bfloat16
        assert module.norm.weight.dtype == torch.float32
        assert torch.equal(module.frequencies, frequencies)


# ------------------------------------------------------------------------------------------------ mode


def test_auto_is_resident_on_the_cpu_and_where_the_budget_has_room(network: Network) -> None:
    assert OffloadedTeacher(copy.deepcopy(network), device="cpu").report().mode == "resident"
    fits = OffloadedTeacher(network, device="cuda", budget_gib=1, copier=SyncCopier()).report()
    assert (fits.mode, fits.device) == ("resident", "cuda")
    assert "budget of 1 GiB" in fits.reason


def test_a_report_prints_what_a_user_asks_first(network: Network, x: Tensor) -> None:
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=SyncCopier())
    with teacher.onload() as module:
        module(x)
    report = dataclasses.replace(teacher.report(), stall_ms=0.04)
    assert str(report) == (
        "teacher: swap on cpu, between visits on cpu; swap was asked for\n"
        "  on cpu: 0.0 MiB now, 0.0 MiB at most; in host memory: 0.0 MiB; shared with the student: 0.0 MiB\n"
        "  copied: 0.0 MiB to cpu, 0.0 MiB back; compute waited 0.0 ms"
    )
    expected = dataclasses.replace(report, predicted_device_bytes=2**20, predicted_stall_ms=1.26)
    assert str(expected).endswith("\n  predicted: at most 1.0 MiB on cpu, 1.3 ms of waiting per visit")


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", ["resident", "swap", "stream"])
@pytest.mark.parametrize("context", MODES)
def test_a_teacher_made_in_any_mode_passes_gradients(
    context: str, mode: Any, home: Any, network: Network, x: Tensor
) -> None:
    def gradient(module: nn.Module) -> Tensor:
        inputs = x.clone().requires_grad_()
        return torch.autograd.grad(module(inputs).square().sum(), inputs)[0]

    want = gradient(network)
    with MODES[context]():
        teacher = OffloadedTeacher(network, device="cpu", mode=mode, home=home, copier=SyncCopier())
    with teacher.onload() as module:
        assert torch.equal(gradient(module), want)


def test_unknown_mode_is_refused(network: Network) -> None:
    with pytest.raises(ValueError, match=r"mode='paged'.*auto, resident, swap, stream"):
        OffloadedTeacher(network, device="cpu", mode="paged")


# ------------------------------------------------------------------------------------------------ invisibility


class Student(nn.Module):
    def __init__(self, teacher: OffloadedTeacher) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.teacher = teacher


@pytest.fixture
def student(network: Network) -> Student:
    return Student(OffloadedTeacher(network, device="cpu", mode="swap", copier=SyncCopier()))


def test_parameters_state_and_modules_are_the_students(student: Student) -> None:
    assert {name for name, _ in student.named_parameters()} == {"layer.weight", "layer.bias"}
    assert set(student.state_dict()) == {"layer.weight", "layer.bias"}
    assert [name for name, _ in student.named_modules()] == ["", "layer"]
    assert list(student.buffers()) == []


def test_train_to_and_requires_grad_do_not_reach_it(student: Student, x: Tensor) -> None:
    want = student.teacher.module(x)
    student.train().double().requires_grad_(True)
    with student.teacher.onload() as module:
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())
        assert torch.equal(module(x), want)


def test_save_state_holds_the_students_weights_only(student: Student, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(student)
    accelerator.save_state(str(tmp_path))
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").stat().st_size < 1000


def test_deepcopy_shares_it_and_pickle_refuses(student: Student) -> None:
    assert copy.deepcopy(student).teacher is student.teacher
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(student)


def test_exponential_moving_average_has_no_teacher_weights(student: Student) -> None:
    average = torch.optim.swa_utils.AveragedModel(student)
    average.update_parameters(student)
    assert {name for name, _ in average.module.named_parameters()} == {"layer.weight", "layer.bias"}


# ------------------------------------------------------------------------------------------------ sharing
