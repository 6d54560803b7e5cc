"""Tests that streamed teachers are bitwise right on every path, in little memory, and after any exception."""

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier, AdversarialTransfer, InjectedError
from teacher_toys import WIDTH, Sampler
from torch import Tensor, nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.units import GIB
from hf_memopt.weights import OffloadedTeacher
from hf_memopt.weights.residency.resident_set import ResidentSet
from hf_memopt.weights.strategies.placement import StreamedVisits

SCHEDULES = ("early", "late", "random")


@pytest.fixture
def sampler() -> Sampler:
    torch.manual_seed(0)
    return Sampler().eval().requires_grad_(False)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(500, (2, 3), generator=torch.Generator().manual_seed(1))


def streamed(module: nn.Module, copier: object = None, budget_gib: float | None = None) -> OffloadedTeacher:
    return OffloadedTeacher(module, device="cpu", mode="stream", copier=copier or SyncCopier(), budget_gib=budget_gib)


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def brought_by(teacher: OffloadedTeacher, visit: Callable[[nn.Module], object]) -> int:
    """Return the bytes that a visit copies to the device."""
    before = teacher.report().bytes_host_to_device
    with teacher.onload() as module:
        visit(module)
    return teacher.report().bytes_host_to_device - before


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("traced_steps", [1, 3])
@pytest.mark.sweep(share=0.4)
def test_outputs_are_bitwise_resident_for_any_number_of_steps(
    sampler: Sampler, tokens: Tensor, schedule: str, traced_steps: int
) -> None:
    reference = copy.deepcopy(sampler)
    copier = AdversarialCopier(schedule)
    teacher = streamed(sampler, copier)
    for num_steps in (traced_steps, *range(1, 11)):
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, num_steps), reference.sample(tokens, num_steps))
        assert teacher.report().device_bytes == copier.live_bytes == 0
        assert torch.equal(module.sample(tokens, 2), reference.sample(tokens, 2))  # the network works at home
    assert teacher.report().bytes_device_to_host == 0


def test_weights_used_once_pass_once_and_unused_ones_never_travel(sampler: Sampler, tokens: Tensor) -> None:
    teacher = streamed(sampler, AdversarialCopier())
    brought_by(teacher, lambda module: module.sample(tokens, 4))
    moved = brought_by(teacher, lambda module: module.sample(tokens, 10))
    unused = bytes_of(sampler.head) + sampler.embedding.weight.nbytes
    padding = 256 * sum(1 for _ in sampler.parameters())
    assert bytes_of(sampler) - unused <= moved < bytes_of(sampler) - unused + padding
    placement = teacher._placement
    assert isinstance(placement, StreamedVisits)
    assert placement.forecast(math.inf) == (teacher.report().peak_device_bytes, moved)


def test_a_visit_with_fewer_rounds_of_a_loop_is_not_learned_from(sampler: Sampler, tokens: Tensor) -> None:
    teacher = streamed(sampler)
    moved = [brought_by(teacher, lambda module, n=n: module.sample(tokens, n)) for n in (4, 4, 1, 10)]
    assert moved[1] == moved[2] == moved[3]


def test_without_a_budget_the_expert_passes_in_every_step(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 4)
    teacher = streamed(sampler, AdversarialCopier(), budget_gib=0)

    def sample(module: nn.Module) -> None:
        assert torch.equal(module.sample(tokens, 4), want)

    moved = [brought_by(teacher, sample) for _ in range(3)]
    # All but what two layers have room for.
    layer = max(bytes_of(layer) for layer in sampler.expert)
    assert moved[-1] > bytes_of(sampler.prefix) + 4 * bytes_of(sampler.expert) - 3 * 2 * layer


@pytest.mark.parametrize("budget_gib", [None, 0])
def test_every_weight_is_on_its_way_before_it_is_needed(
    sampler: Sampler, tokens: Tensor, monkeypatch: pytest.MonkeyPatch, budget_gib: float | None
) -> None:
    teacher = streamed(sampler, budget_gib=budget_gib)
    for _ in range(2):
        with teacher.onload() as module:
            module.sample(tokens, 4)
    missing: list[int] = []
    enter = ResidentSet.enter

    def watched(self: ResidentSet, visit: tuple[int, ...], *others: Any) -> None:
        missing.extend(number for number in visit if not self.storages[number].has_memory)
        enter(self, visit, *others)

    monkeypatch.setattr(ResidentSet, "enter", watched)
    teacher.prefetch()
    with teacher.onload() as module:
        module.sample(tokens, 4)
    assert missing == []


@pytest.mark.parametrize("budget_gib", [None, 0, 8e-6])
def test_device_memory_keeps_to_the_forecast(sampler: Sampler, tokens: Tensor, budget_gib: float | None) -> None:
    teacher = streamed(sampler, AdversarialCopier(), budget_gib)
    for num_steps in (4, 4, 1, 10):
        teacher.prefetch()
        with teacher.onload() as module:
            module.sample(tokens, num_steps)
    report = teacher.report()
    assert report.peak_device_bytes <= report.predicted_device_bytes < bytes_of(sampler) / 2
    if budget_gib:
        assert report.peak_device_bytes <= budget_gib * GIB


def test_a_way_that_was_never_taken_is_right(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 2, use_head=True)
    backwards = sampler.expert[2](sampler.prefix[3](sampler.embedding(tokens)))
    row = sampler.head.weight[3] * 2
    teacher = streamed(sampler, AdversarialCopier("random"))
    for _ in range(2):
        with teacher.onload() as module:
            module.sample(tokens, 2)
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2, use_head=True), want)
            assert torch.equal(module.expert[2](module.prefix[3](module.embedding(tokens))), backwards)
            assert torch.equal(module.head.weight[3] * 2, row)


def test_a_visit_without_a_call_is_not_learned_from(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 2)
    teacher = streamed(sampler, AdversarialCopier())
    with teacher.onload():
        pass
    assert teacher.report().predicted_device_bytes is None
    for _ in range(2):
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2), want)
    assert teacher.report().predicted_device_bytes


class WritesBuffers(nn.Module):
    """A module that keeps a cache, counters and a codebook in buffers, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("cache", torch.zeros(8, WIDTH))
        self.register_buffer("length", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("window", self.codes[1:3], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        self.cache[self.length] = y[0]
        self.length += 1
        self.codes.data.lerp_(y[:4].detach(), 0.1)  # bypasses version counters
        return y @ self.cache.t() @ self.cache + self.window.sum(0)


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", ["resident", "swap", "stream"])
@pytest.mark.sweep(share=0.4)
def test_teachers_keep_what_they_write(mode: str, home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = WritesBuffers().eval()
    disk = tmp_path if home == "file" else None
    teacher = OffloadedTeacher(
        copy.deepcopy(plain), device="cpu", mode=mode, copier=AdversarialCopier("late"), home=home, disk=disk
    )
    x = torch.randn(6, 4, WIDTH)
    with torch.no_grad():
        for number in range(3):
            with teacher.onload() as module:
                for each in x[2 * number : 2 * number + 2]:
                    assert torch.equal(module(each), plain(each))
    assert all(torch.equal(mine, its) for mine, its in zip(module.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_threads_may_share_a_teacher(sampler: Sampler, tokens: Tensor, mode: str) -> None:
    want = sampler.sample(tokens, 2)
    teacher = OffloadedTeacher(sampler, device="cpu", mode=mode, copier=SyncCopier())

    def visit(_: int) -> bool:
        with teacher.onload() as module, torch.no_grad():
            return torch.equal(module.sample(tokens, 2), want)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(visit, range(30)))
    assert teacher.report().device_bytes == 0


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("schedule", "every"), [*((each, 9) for each in SCHEDULES), pytest.param("late", 1, marks=pytest.mark.slow)]
)
@pytest.mark.sweep(share=0.3)
def test_the_next_visit_is_right_after_a_fault_in_any_copy(tokens: Tensor, schedule: str, every: int) -> None:
    sampler = Sampler(num_prefix=1, num_expert=1).eval().requires_grad_(False)
    want = sampler.sample(tokens, 1)
    counter = AdversarialCopier()
    teacher = streamed(copy.deepcopy(sampler), counter)
    for _ in range(3):
        with teacher.onload() as module:
            module.sample(tokens, 1)
    for fail_at in range(2, counter.num_operations, every):  # the first one is the teacher's own
        copier = AdversarialCopier(schedule, fail_at=fail_at)
        teacher = streamed(copy.deepcopy(sampler), copier)
        faults = 0
        for _ in range(4):
            try:
                with teacher.onload() as module:
                    assert torch.equal(module.sample(tokens, 1), want)
            except InjectedError:
                faults += 1
            assert torch.equal(teacher.module.sample(tokens, 1), want)
        assert faults == 1
        assert teacher.report().device_bytes == copier.live_bytes == 0


@pytest.mark.parametrize(
    ("error", "num_visits"),
    [
        (torch.OutOfMemoryError, 1),
        pytest.param(KeyboardInterrupt, 1, marks=pytest.mark.slow),
        pytest.param(torch.OutOfMemoryError, 0, marks=pytest.mark.slow),
        pytest.param(KeyboardInterrupt, 0, marks=pytest.mark.slow),
    ],
)
def test_the_next_visit_is_right_after_a_fault_in_any_forward(
    sampler: Sampler, tokens: Tensor, error: type[BaseException], num_visits: int
) -> None:
    want = sampler.sample(tokens, 2)
    copier = AdversarialCopier("random")
    teacher = streamed(sampler, copier)
    for _ in range(num_visits):
        with teacher.onload() as module:
            module.sample(tokens, 2)

    def fail(*_: object) -> None:
        raise error("injected")

    called = [module for name, module in sampler.named_modules() if name not in ("", "head", "prefix", "expert")]
    for child in (
        module for module in called if not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    ):
        handle = child.register_forward_pre_hook(fail)
        with pytest.raises(error, match="injected"), teacher.onload() as module:
            module.sample(tokens, 2)
        handle.remove()
        assert copier.live_bytes == 0
        assert torch.equal(teacher.module.sample(tokens, 2), want)
    with teacher.onload() as module:
        assert torch.equal(module.sample(tokens, 2), want)


def test_a_copy_that_nobody_waits_for_is_caught(
    sampler: Sampler, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = streamed(sampler, AdversarialCopier("late"))
    monkeypatch.setattr(AdversarialTransfer, "wait", lambda self: None)
    with pytest.raises(AssertionError, match="released under a copy"), teacher.onload() as module:
        assert module.sample(tokens, 1).isnan().all()


# ------------------------------------------------------------------------------------------------ late reads


class HoldsViews(nn.Module):
    """A module that takes views of weights, runs other layers, and only then reads the views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.late = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        held = [self.first.weight.t(), *(layer.weight[:1] for layer in self.layers[:2])]
        for layer in self.layers:
            x = layer(x).tanh()
        return (x @ held[0]) * held[1] + held[2] * self.late


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_views_may_outlive_the_call_that_they_are_of(schedule: str) -> None:
    torch.manual_seed(0)
    module = HoldsViews().eval()
    x = torch.randn(2, 16)
    want = module(x)
    teacher = streamed(module, AdversarialCopier(schedule))
    for _ in range(3):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(x), want)


@pytest.mark.parametrize("inference", [False, True])
def test_gradient_and_inference_modes(sampler: Sampler, tokens: Tensor, inference: bool) -> None:
    want = sampler.sample(tokens, 2)
    teacher = streamed(sampler, AdversarialCopier())
    for _ in range(3):
        with torch.inference_mode(inference), teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2), want)
    with teacher.onload() as module:
        assert torch.equal(module.sample(tokens, 2), want)


def test_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    teacher = streamed(module, AdversarialCopier("late"))
    for _ in range(3):
        with teacher.onload() as module:
            (got,) = torch.autograd.grad(module(x).square().sum(), x)
        assert torch.equal(got, want)


def test_a_copy_of_the_module_is_a_module_of_its_own(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 2)
    teacher = streamed(sampler)
    with teacher.onload() as module:
        module.sample(tokens, 2)
    duplicate = copy.deepcopy(teacher.module)
    duplicate.gain.zero_()
    assert torch.equal(duplicate.sample(tokens, 2), torch.zeros_like(want))
    with teacher.onload() as module:
        assert torch.equal(module.sample(tokens, 2), want)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_of_transformers(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=100,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(100, (2, 7))
    with torch.no_grad():
        want = model(tokens).logits
    teacher = streamed(model, AdversarialCopier("random"))
    for _ in range(3):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(tokens).logits, want)
    assert teacher.report().peak_device_bytes <= 2 * 100 * 32 * 4


def test_what_one_loop_reads_is_gone_before_the_next_loop() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(15)]
    module = nn.Sequential(*layers[:6] * 3, layers[6], *layers[7:] * 3)
    x = torch.ones(1, 64)
    want = module(x)
    teacher = streamed(module, AdversarialCopier())
    for _ in range(3):
        with teacher.onload() as module:
            assert torch.equal(module(x), want)
    layer_bytes = 64 * 64 * 4
    assert teacher.report().peak_device_bytes <= 9 * layer_bytes
    assert brought_by(teacher, lambda module: module(x)) == 15 * layer_bytes
