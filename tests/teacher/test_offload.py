"""OffloadedTeacher: bitwise the resident teacher, invisible to the student, and right again after any exception."""

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from adversarial_copier import AdversarialCopier, InjectedError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.teacher import OffloadedTeacher
from hf_memopt.teacher.packed_weights import PackedWeights, bind
from hf_memopt.teacher.packed_weights import views as packed_views
from hf_memopt.teacher.strategies.placement import SwappedWeights
from hf_memopt.transfer import SyncCopier

SCHEDULES = ("early", "late", "random")


class Network(nn.Module):
    """Has everything that makes offloading go wrong: a tie, a strided weight, buffers of both kinds, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.transposed = nn.Parameter(torch.randn(6, 6).t())
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.register_buffer("frequencies", torch.randn(6), persistent=False)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x) + self.tied(x)) @ self.transposed
        return self.low((x * self.frequencies).bfloat16()).float()


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    network = Network().eval()
    network.norm.running_mean.normal_()
    return network


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def memory_of(module: nn.Module) -> dict[str, int]:
    return {
        name: tensor.data_ptr() for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_swap_is_bitwise_resident_and_copies_nothing_back(network: Network, x: Tensor, schedule: str) -> None:
    want = [network(k * x) for k in range(1, 6)]
    resident = OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="resident")
    copier = AdversarialCopier(schedule)
    swapped = OffloadedTeacher(network, device="cpu", mode="swap", copier=copier)
    home = memory_of(network)
    for k, expected in enumerate(want, start=1):
        with swapped.onload() as module:
            assert torch.equal(module(k * x), expected)
        with resident.onload() as module:
            assert torch.equal(module(k * x), expected)
    report = swapped.report()
    assert report.bytes_host_to_device == len(want) * report.host_bytes
    assert report.bytes_device_to_host == 0
    assert report.device_bytes == copier.live_bytes == 0
    assert memory_of(network) == home
    assert resident.report().bytes_host_to_device == 0


def test_a_missing_wait_is_caught(network: Network, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=AdversarialCopier("late"))
    monkeypatch.setattr(SwappedWeights, "_finish_copy", lambda self: None)
    with pytest.raises(AssertionError, match="released under a copy"):
        with teacher.onload() as module:
            assert module(x).isnan().all()


def test_ties_strides_and_small_tensors_survive(network: Network) -> None:
    stride, num_bytes = network.transposed.stride(), sum(p.nbytes for p in network.parameters())
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=SyncCopier())
    with teacher.onload() as module:
        assert module.tied.weight is module.embed.weight
        assert module.transposed.stride() == stride
        assert module.frequencies.data_ptr() != module.embed.weight.data_ptr()
    assert num_bytes < teacher.report().host_bytes < num_bytes + 256 * 16


def test_views_of_one_storage_travel_once() -> None:
    module = nn.Module()
    whole = torch.randn(100)
    module.register_buffer("left", whole[:60])
    module.register_buffer("right", whole[40:])
    weights = PackedWeights(module)
    assert weights.num_bytes == 512  # 400 bytes, aligned
    block = torch.empty(weights.num_bytes, dtype=torch.uint8)
    weights.pack(block)
    bind(weights.offsets, packed_views(weights.offsets, block))
    assert torch.equal(module.left, whole[:60])
    assert module.right.data_ptr() - module.left.data_ptr() == 40 * 4


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A random view of a random storage."""
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
    )
    size = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    base = torch.arange(200).to(dtype)
    stride = [draw(st.integers(0, 9)) for _ in size]
    return base.as_strided(size, stride, draw(st.integers(0, 50)))


@settings(max_examples=300, deadline=None)
@given(st.lists(views(), min_size=1, max_size=5))
def test_any_views_are_restored(tensors: list[Tensor]) -> None:
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"buffer_{index}", tensor)
    want = [(tensor.clone(), tensor.stride()) for tensor in tensors]
    weights = PackedWeights(module)
    block = torch.full((weights.num_bytes,), 255, dtype=torch.uint8)
    weights.pack(block)
    bind(weights.offsets, packed_views(weights.offsets, block.clone()))
    for (value, stride), tensor in zip(want, module.buffers(), strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == stride


def count_operations(network: Network, x: Tensor) -> int:
    copier = AdversarialCopier()
    with OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="swap", copier=copier).onload() as module:
        module(x)
    return copier.num_operations


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_next_visit_is_right_after_a_fault_in_any_copy(network: Network, x: Tensor, schedule: str) -> None:
    want = network(x)
    num_operations = count_operations(network, x)
    assert num_operations == 3  # allocate, copy, wait
    for fail_at in range(1, 2 * num_operations + 1):
        copier = AdversarialCopier(schedule, fail_at=fail_at)
        teacher = OffloadedTeacher(copy.deepcopy(network), device="cpu", mode="swap", copier=copier)
        home = memory_of(teacher.module)
        faults = 0
        for _ in range(3):
            try:
                with teacher.onload() as module:
                    assert torch.equal(module(x), want)
            except InjectedError:
                faults += 1
            assert memory_of(teacher.module) == home
            assert torch.equal(teacher.module(x), want)
        assert faults == 1
        assert teacher.report().device_bytes == 0


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


def test_prefetch_starts_one_copy_and_survives_an_exception(network: Network, x: Tensor) -> None:
    want = network(x)
    copier = AdversarialCopier("late")
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", copier=copier)
    teacher.prefetch()
    teacher.prefetch()
    assert copier.bytes_to_device == teacher.report().device_bytes == teacher.report().host_bytes
    assert torch.equal(network(x), want)  # still usable at home
    with teacher.onload() as module:
        assert torch.equal(module(x), want)
    assert copier.bytes_to_device == teacher.report().host_bytes
    assert copier.live_bytes == 0


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


class Copies(TorchDispatchMode):
    """Lists every operation that creates or writes data, with its dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)} | {(kwargs or {}).get("dtype")} - {None}
            self.seen.append((func.__name__, dtypes))
        return func(*args, **(kwargs or {}))


def test_a_visit_is_one_copy_of_bytes_without_a_cast(network: Network) -> None:
    teacher = OffloadedTeacher(network, device="cpu", mode="swap", dtype=torch.bfloat16, copier=SyncCopier())
    with Copies() as copies, teacher.onload():
        pass
    assert copies.seen == [("copy_.default", {torch.uint8})]


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


def test_unknown_mode_is_refused(network: Network) -> None:
    with pytest.raises(ValueError, match=r"mode='paged'.*auto, resident, swap, stream"):
        OffloadedTeacher(network, device="cpu", mode="paged")


class Quantised(Tensor):
    pass


@pytest.mark.parametrize("weight", [torch.randn(2, 2).as_subclass(Quantised), torch.empty(2, 2, device="meta")])
def test_weights_that_cannot_be_rebound_are_refused(weight: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("odd", weight)
    with pytest.raises(ValueError, match="teacher weight 'odd'"):
        OffloadedTeacher(module, device="cpu")


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
    accelerator = Accelerator(cpu=True)
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


@pytest.fixture
def pair(network: Network) -> tuple[Network, Network]:
    """A teacher, and a student with frozen embeddings whose other weights are equal but trained."""
    student = copy.deepcopy(network)
    student.embed.weight.requires_grad_(False)
    return network, student


def test_frozen_equal_weights_are_held_once(pair: tuple[Network, Network], x: Tensor) -> None:
    teacher, student = pair
    want = teacher(x)
    alone = OffloadedTeacher(copy.deepcopy(teacher), device="cpu", mode="swap", copier=SyncCopier())
    offloaded = OffloadedTeacher(teacher, device="cpu", mode="swap", share_with=student, copier=AdversarialCopier())
    assert teacher.embed.weight.data_ptr() == student.embed.weight.data_ptr()
    assert teacher.low.weight.data_ptr() != student.low.weight.data_ptr()
    assert offloaded.report().shared_bytes == student.embed.weight.nbytes
    assert offloaded.report().host_bytes == alone.report().host_bytes - 256
    with torch.no_grad():
        student.low.weight.zero_()  # training the student
    with offloaded.onload() as module:
        assert torch.equal(module(x), want)


def test_sharing_follows_the_student_when_it_moves(pair: tuple[Network, Network], x: Tensor) -> None:
    teacher, student = pair
    want = teacher(x)
    offloaded = OffloadedTeacher(teacher, device="cpu", mode="swap", share_with=student, copier=SyncCopier())
    student.embed.weight.data = student.embed.weight.data.clone()  # what Module.to does
    with offloaded.onload() as module:
        assert module.embed.weight.data_ptr() == student.embed.weight.data_ptr()
        assert torch.equal(module(x), want)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.requires_grad_(True),
        lambda weight: weight.add_(1),
        lambda weight: setattr(weight, "data", weight.data.double()),
    ],
    ids=["unfrozen", "written", "cast"],
)
def test_changed_shared_weights_are_refused(pair: tuple[Network, Network], change: object) -> None:
    teacher, student = pair
    offloaded = OffloadedTeacher(teacher, device="cpu", mode="swap", share_with=student, copier=SyncCopier())
    change(student.embed.weight)
    with pytest.raises(RuntimeError, match=r"'embed.weight'.*load the teacher again"), offloaded.onload():
        pass
