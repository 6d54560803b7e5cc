"""Tests that streamed teachers are bitwise right on every path, in a small ring, and after any exception."""

import copy
import itertools

import pytest
import torch
from adversarial_copier import POISON, AdversarialCopier, InjectedError
from teacher_toys import WIDTH, Sampler
from torch import Tensor, nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights import OffloadedTeacher, homes
from hf_memopt.weights.strategies.stream import StreamedVisits
from hf_memopt.weights.streaming import ring
from hf_memopt.weights.streaming.copy_schedule import StreamPlan

SCHEDULES = ("early", "late", "random")


@pytest.fixture
def sampler() -> Sampler:
    torch.manual_seed(0)
    return Sampler().eval().requires_grad_(False)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(500, (2, 3), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def only_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make in-place reads give NaN, except for the first embedding: every other weight has to be copied."""

    def poisoned(master: Tensor, device: torch.device) -> Tensor:
        copied = torch.full_like(master, POISON)
        copied[: 500 * WIDTH * 4] = master[: 500 * WIDTH * 4]
        return copied

    monkeypatch.setattr(homes, "readable_in_place", poisoned)


def streamed(module: nn.Module, copier: object = None, budget_gib: float | None = None) -> OffloadedTeacher:
    return OffloadedTeacher(module, device="cpu", mode="stream", copier=copier or SyncCopier(), budget_gib=budget_gib)


def plan_of(teacher: OffloadedTeacher) -> StreamPlan:
    assert isinstance(teacher._placement, StreamedVisits)
    assert teacher._placement.plan is not None
    return teacher._placement.plan


def named_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in itertools.chain(module.parameters(), module.buffers()))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("traced_steps", [1, 3])
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
    copier = AdversarialCopier()
    teacher = streamed(sampler, copier)
    with teacher.onload() as module:
        module.sample(tokens, 4)
    before = copier.bytes_to_device
    with teacher.onload() as module:
        module.sample(tokens, 10)
    unused = named_bytes(sampler.head) + sampler.embedding.weight.nbytes
    moved = copier.bytes_to_device - before
    assert moved <= plan_of(teacher).visit_bytes <= 1.05 * moved
    padding = 256 * sum(1 for _ in itertools.chain(sampler.parameters(), sampler.buffers()))
    assert named_bytes(sampler) - unused <= moved < named_bytes(sampler) - unused + padding


def test_without_a_hot_set_the_expert_passes_in_every_step(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 4)
    copier = AdversarialCopier()
    teacher = streamed(sampler, copier, budget_gib=0)
    for _ in range(3):
        before = copier.bytes_to_device
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 4), want)
    assert plan_of(teacher).hot_bytes == 256  # `gain`, which belongs to no module that is called
    expert = named_bytes(sampler.expert)
    assert copier.bytes_to_device - before > named_bytes(sampler.prefix) + 4 * expert


@pytest.mark.parametrize("budget_gib", [None, 0])
def test_every_block_is_on_its_way_before_it_is_needed(
    sampler: Sampler, tokens: Tensor, monkeypatch: pytest.MonkeyPatch, budget_gib: float | None
) -> None:
    teacher = streamed(sampler, budget_gib=budget_gib)
    with teacher.onload() as module:
        module.sample(tokens, 4)
    missing: list[int] = []
    enter = StreamedVisits._enter

    def watched(self: StreamedVisits, needs: tuple[int, ...]) -> None:
        missing.extend(number for number in needs if number not in self._ring.present)
        enter(self, needs)

    monkeypatch.setattr(StreamedVisits, "_enter", watched)
    teacher.prefetch()
    with teacher.onload() as module:
        module.sample(tokens, 4)
    assert missing == []


class PeakCopier(AdversarialCopier):
    peak_bytes = 0

    def empty_device(self, num_bytes: int) -> Tensor:
        memory = super().empty_device(num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return memory


@pytest.mark.parametrize("budget_gib", [None, 0, 8e-6])
def test_device_memory_keeps_to_the_formula(sampler: Sampler, tokens: Tensor, budget_gib: float | None) -> None:
    copier = PeakCopier()
    teacher = streamed(sampler, copier, budget_gib)
    for num_steps in (4, 1, 10):
        teacher.prefetch()
        with teacher.onload() as module:
            module.sample(tokens, num_steps)
    plan, report = plan_of(teacher), teacher.report()
    largest = max(plan.blocks[number].num_bytes for number in plan.sequence)
    assert plan.ring_bytes <= 3 * largest
    assert report.predicted_device_bytes == plan.hot_bytes + plan.ring_bytes
    assert copier.peak_bytes <= 1.05 * report.predicted_device_bytes
    assert report.peak_device_bytes <= copier.peak_bytes
    assert report.predicted_device_bytes < named_bytes(sampler) / 2


def test_a_path_that_was_never_traced_is_right(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 2, use_head=True)
    backwards = sampler.expert[2](sampler.prefix[3](sampler.embedding(tokens)))
    teacher = streamed(sampler, AdversarialCopier("random"))
    for _ in range(2):
        with teacher.onload() as module:
            module.sample(tokens, 2)
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2, use_head=True), want)
            assert torch.equal(module.expert[2](module.prefix[3](module.embedding(tokens))), backwards)


def test_what_the_ring_does_not_bring_is_read_in_place(
    sampler: Sampler, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "readable_in_place", lambda master, device: master)
    want = sampler.head.weight[3] * 2
    teacher = streamed(sampler)
    for _ in range(2):
        with teacher.onload() as module:
            module.sample(tokens, 1)
            assert torch.equal(module.head.weight[3] * 2, want)


def test_the_first_visit_without_a_call_is_not_planned_from(sampler: Sampler, tokens: Tensor) -> None:
    want = sampler.sample(tokens, 2)
    teacher = streamed(sampler, AdversarialCopier())
    with teacher.onload():
        pass
    assert teacher.report().predicted_device_bytes is None
    for _ in range(2):
        with teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2), want)
    assert teacher.report().predicted_device_bytes


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("schedule", "every"), [*((each, 9) for each in SCHEDULES), pytest.param("late", 1, marks=pytest.mark.slow)]
)
def test_the_next_visit_is_right_after_a_fault_in_any_copy(tokens: Tensor, schedule: str, every: int) -> None:
    sampler = Sampler(num_prefix=1, num_expert=1).eval().requires_grad_(False)
    want = sampler.sample(tokens, 1)
    counter = AdversarialCopier()
    teacher = streamed(copy.deepcopy(sampler), counter)
    for _ in range(3):
        with teacher.onload() as module:
            module.sample(tokens, 1)
    for fail_at in range(1, counter.num_operations, every):
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
    monkeypatch.setattr(ring, "_wait", lambda slot: slot.on_their_way.clear())
    with pytest.raises(AssertionError, match="released under a copy"), teacher.onload() as module:
        assert module.sample(tokens, 1).isnan().all()


def test_a_weight_that_is_not_brought_is_caught(sampler: Sampler, tokens: Tensor) -> None:
    teacher = streamed(sampler)
    with teacher.onload() as module:
        module.sample(tokens, 1)
    sampler.prefix[2].wide._forward_pre_hooks.clear()
    sampler.prefix[2]._forward_pre_hooks.clear()
    with teacher.onload() as module:
        assert module.sample(tokens, 1).isnan().any()


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
def test_views_that_outlive_their_block_keep_its_memory(schedule: str) -> None:
    torch.manual_seed(0)
    module = HoldsViews().eval()
    x = torch.randn(2, 16)
    want = module(x)
    teacher = streamed(module, KeepsHeldMemory(schedule))
    for _ in range(3):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(x), want)


class KeepsHeldMemory(AdversarialCopier):
    """A copier that leaves released slots as they are: allocators reuse no memory that a view holds."""

    def release(self, buffer: Tensor) -> None:
        contents = buffer.clone()
        super().release(buffer)
        buffer.copy_(contents)


@pytest.mark.parametrize("inference", [False, True])
def test_gradient_and_inference_modes(sampler: Sampler, tokens: Tensor, inference: bool) -> None:
    want = sampler.sample(tokens, 2)
    teacher = streamed(sampler, AdversarialCopier())
    for _ in range(3):
        with torch.inference_mode(inference), teacher.onload() as module:
            assert torch.equal(module.sample(tokens, 2), want)
    with teacher.onload() as module:
        assert torch.equal(module.sample(tokens, 2), want)


def test_gradients_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "readable_in_place", lambda master, device: master)
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    teacher = streamed(module, KeepsHeldMemory("late"))
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
def test_a_language_model_of_transformers(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(homes, "readable_in_place", lambda master, device: master)
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
    plan = plan_of(teacher)
    assert plan.at_start == ()
    assert plan.hot_bytes == 0
    assert plan.ring_bytes < named_bytes(model) / 3


# ------------------------------------------------------------------------------------------------ the plan


def test_a_device_that_cannot_read_host_memory_is_refused(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"mode='stream'.*cuda.*ulimit -l.*mode='swap'"):
        OffloadedTeacher(sampler, device="cuda", mode="stream", copier=SyncCopier())


def test_what_one_loop_reads_is_gone_before_the_next_loop() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(15)]
    module = nn.Sequential(*layers[:6] * 3, layers[6], *layers[7:] * 3)
    x = torch.ones(1, 64)
    want = module(x)
    copier = PeakCopier()
    teacher = streamed(module, copier)
    for _ in range(3):
        with teacher.onload() as module:
            assert torch.equal(module(x), want)
    layer_bytes = 64 * 64 * 4
    assert plan_of(teacher).hot_bytes == 8 * layer_bytes
    assert copier.peak_bytes <= 10 * layer_bytes
