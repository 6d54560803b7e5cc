"""detect_leaks and LeakMonitor: every planted leak is found and put down to the right holder, sound loops are not."""

import gc
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt.memory.leaks.detect import LeakMonitor, LeakReport, MemoryLeakError, detect_leaks
from hf_memopt.memory.leaks.live_storages import live_storages
from hf_memopt.memory.leaks.referrers import describe_holder
from hf_memopt.memory.leaks.storage_ages import StorageAges

WIDTH, BATCH = 32, 16
ACTIVATION_BYTES = 4 * BATCH * WIDTH

Step = Callable[[], object]


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """What is older than this module is hidden, which makes a census fast."""
    toy_step(*toy())  # torch imports a lot when an optimizer runs for the first time
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=[True, False], ids=["gc", "no_gc"])
def _garbage_collection(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    if not request.param:
        gc.disable()
    yield
    gc.enable()
    # The planted cycle of parameter and gradient goes through C++, where no collector breaks it.
    for entry in [entry for entries in live_storages().values() for entry in entries if entry.kind == "gradient"]:
        entry.root.grad = None


def toy() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model, torch.optim.Adam(model.parameters())


def inputs(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, WIDTH)


def toy_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = BATCH) -> Tensor:
    loss: Tensor = model(inputs(batch)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# ---------------------------------------------------------------------------------------- leaks that must be found


def kept_loss() -> Step:
    model, optimizer = toy()
    losses = []
    return lambda: losses.append(toy_step(model, optimizer))


def retained_graph() -> Step:
    model, _ = toy()
    losses = []

    def step() -> None:
        loss = model(inputs()).square().mean()
        loss.backward(retain_graph=True)
        losses.append(loss)

    return step


def growing_outputs() -> Step:
    model, optimizer = toy()
    outputs = []

    def step() -> None:
        toy_step(model, optimizer)
        outputs.append(model[0](inputs()).detach())

    return step


def growing_outputs_of_any_length() -> Step:
    model, _ = toy()
    outputs = {}

    def step() -> None:
        outputs[len(outputs)] = model[0](inputs(int(torch.randint(8, 64, ())))).detach()

    return step


def parameter_gradient_cycle() -> Step:
    model, _ = toy()
    return lambda: model(inputs()).square().mean().backward(create_graph=True)


def failing_forward(model: nn.Sequential) -> None:
    hidden = model[0](inputs())
    raise ValueError(f"bad batch of {len(hidden)}")


def swallowed_exception() -> Step:
    model, _ = toy()
    errors = []

    def step() -> None:
        try:
            failing_forward(model)
        except ValueError as error:
            errors.append(error)

    return step


def garbage_cycle() -> Step:
    class Node:
        def __init__(self) -> None:
            self.me, self.batch = self, inputs()

    return Node


def class_attribute() -> Step:
    class Network:
        cache: ClassVar[dict[int, Tensor]] = {}

        def forward(self) -> None:
            self.cache[len(self.cache)] = inputs()

    return Network().forward


LEAKS: dict[str, tuple[Callable[[], Step], str, tuple[int | None, ...], str]] = {
    "kept loss": (kept_loss, "tensor with its graph", (), "losses["),
    "retain_graph with kept losses": (retained_graph, "saved for backward", (BATCH, WIDTH), "losses["),
    "growing list": (growing_outputs, "tensor", (BATCH, WIDTH), "outputs["),
    "growing dict, lengths differ": (growing_outputs_of_any_length, "tensor", (None, WIDTH), "outputs["),
    "create_graph": (parameter_gradient_cycle, "saved for backward", (BATCH, WIDTH), "in the graph of the .grad of"),
    "exception": (
        swallowed_exception,
        "tensor with its graph",
        (BATCH, WIDTH),
        "].__traceback__ → hidden of fail",
    ),
    "cycle": (garbage_cycle, "tensor", (BATCH, WIDTH), "<Node>.batch"),
    "class attribute": (class_attribute, "tensor", (BATCH, WIDTH), "Network.cache["),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")  # that is the leak
@pytest.mark.usefixtures("_garbage_collection")
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_and_put_down_to_its_holder(name: str) -> None:
    make, kind, shape, holder = LEAKS[name]
    if name == "cycle" and gc.isenabled():
        pytest.skip("the collector frees it, at a time of its own choosing")
    report = detect_leaks(make())
    assert report.leaking
    matching = [culprit for culprit in report.culprits if (culprit.kind, culprit.shape) == (kind, shape)]
    assert matching, str(report)
    assert holder in matching[0].held_by
    assert matching[0].count >= 35
    assert matching[0].held_by in str(report)


def test_sizes_are_exact() -> None:
    report = detect_leaks(growing_outputs())
    assert report.bytes_per_step == ACTIVATION_BYTES
    (culprit,) = report.culprits
    assert (culprit.count, culprit.bytes, culprit.dtype) == (40, 40 * ACTIVATION_BYTES, torch.float32)
    assert (report.first_step, report.last_step) == (11, 50)


def test_nodes_of_a_kept_graph_are_counted() -> None:
    (culprit,) = detect_leaks(kept_loss()).culprits
    loss = toy_step(*toy())
    nodes, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [following for following, _ in node.next_functions]
    assert culprit.graph_nodes == len(nodes) > 5


def test_a_chain_of_exceptions_is_followed() -> None:
    """Each exception the cause of the next, and only the newest has a name."""
    model, _ = toy()
    last: Any = None

    def step() -> None:
        nonlocal last
        try:
            failing_forward(model)
        except ValueError as error:
            error.__cause__ = last
            last = error

    report = detect_leaks(step)
    assert report.leaking
    assert any(
        each.held_by.startswith("last.__cause__.__cause__")
        and "__traceback__ → hidden of failing_forward" in each.held_by
        for each in report.culprits
    )


def test_the_last_exception_of_an_interactive_session_is_found() -> None:
    gc.unfreeze()  # sys is older than the test
    try:
        failing_forward(toy()[0])
    except ValueError as error:
        sys.last_exc = error
    try:
        holder = describe_holder(sys.last_exc.__traceback__)
    finally:
        del sys.last_exc
        gc.collect()
        gc.freeze()
    assert holder == "sys.last_exc.__traceback__"


def test_garbage_that_waits_for_the_collector_is_told_apart() -> None:
    gc.disable()
    report = detect_leaks(garbage_cycle())
    assert report.bytes_freed_by_gc == 40 * ACTIVATION_BYTES
    assert "gc.collect() freed" in str(report)
    assert detect_leaks(growing_outputs()).bytes_freed_by_gc == 0


# -------------------------------------------------------------------------------------- loops that must stay quiet


def plain() -> Step:
    model, optimizer = toy()
    return lambda: toy_step(model, optimizer)


def kept_values() -> Step:
    model, optimizer = toy()
    losses = []
    return lambda: losses.append(toy_step(model, optimizer).detach())


def lengths(order: Callable[[], int], held: int) -> Step:
    """The last `held` batches are alive between steps, as with a data loader that works ahead."""
    model, optimizer = toy()
    alive: list[Tensor] = []

    def step() -> None:
        alive.append(inputs(order()))
        model(alive[0]).square().mean().backward()
        optimizer.step()
        del alive[: -held or None]

    return step


def random_lengths() -> Step:
    return lengths(lambda: int(torch.randint(1, 200, ())), held=1)


def sorted_lengths() -> Step:
    ascending = iter(range(8, 8000, 8))
    return lengths(lambda: next(ascending), held=8)


def sorted_then_bucketed_lengths() -> Step:
    buckets = iter([*range(8, 8 * 30, 8), *(8 * (1 + int(torch.randint(30, ()))) for _ in range(100))])
    return lengths(lambda: next(buckets), held=4)


def evaluation() -> Step:
    model, optimizer = toy()
    state = {"step": 0, "predictions": None}

    def step() -> None:
        toy_step(model, optimizer)
        state["step"] += 1
        if state["step"] % 7 == 0:
            with torch.no_grad():
                state["predictions"] = torch.cat([model[0](inputs()) for _ in range(state["step"])])

    return step


def r1_penalty() -> Step:
    """The gradient penalty with the `retain_graph=True` that was taken for a leak."""
    discriminator, optimizer = toy()

    def step() -> None:
        real = inputs().requires_grad_()
        outputs = discriminator(real)
        (gradient,) = torch.autograd.grad(
            outputs=outputs.sum(), inputs=real, create_graph=True, retain_graph=True, only_inputs=True
        )
        (outputs.mean() + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def create_graph_and_zero_grad() -> Step:
    model, optimizer = toy()

    def step() -> None:
        model(inputs()).square().mean().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def cache_by_length() -> Step:
    """Filled in no order, so that the last new length may come late."""
    model, optimizer = toy()
    cosines: dict[int, Tensor] = {}

    def step() -> None:
        length = int(torch.randint(1, 24, ()))
        toy_step(model, optimizer)
        cosines.setdefault(length, torch.randn(64 * length))

    return step


def moving_average() -> Step:
    model, optimizer = toy()
    average = deepcopy(model)
    replaced = [[torch.zeros_like(p) for p in model.parameters()]]

    def step() -> None:
        toy_step(model, optimizer)
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
            replaced[0] = [old.lerp(new, 0.1) for old, new in zip(replaced[0], model.parameters(), strict=True)]

    return step


def kept_every_tenth_step() -> Step:
    """What a user keeps once per epoch, with very short epochs."""
    model, optimizer = toy()
    kept: list[Tensor] = []
    count = iter(range(10_000))

    def step() -> None:
        toy_step(model, optimizer)
        if next(count) % 10 == 0:
            kept.append(inputs())

    return step


SOUND = [
    plain,
    kept_values,
    random_lengths,
    sorted_lengths,
    sorted_then_bucketed_lengths,
    evaluation,
    r1_penalty,
    create_graph_and_zero_grad,
    cache_by_length,
    moving_average,
    kept_every_tenth_step,
]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")  # sound if zeroed
@pytest.mark.usefixtures("_garbage_collection")
@pytest.mark.parametrize("make", SOUND)
def test_a_sound_loop_is_not_complained_of(make: Callable[[], Step]) -> None:
    report = detect_leaks(make())
    assert not report.leaking, str(report)
    assert report.culprits == ()
    assert "No memory leak" in str(report)
    assert "Not seen on the CPU" in str(report)


# ------------------------------------------------------------------------------------------------------ the monitor


def run(step: Step, monitor: LeakMonitor, num_steps: int = 60) -> list[LeakReport]:
    reports = []
    for _ in range(num_steps):
        step()
        reports.append(monitor.step())
    return [report for report in reports if report is not None]


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_monitor_reports_once(every_n_steps: int, caplog: pytest.LogCaptureFixture) -> None:
    step, monitor = growing_outputs(), LeakMonitor(every_n_steps)
    assert run(step, monitor, num_steps=60 * every_n_steps) == [monitor.report]
    assert [record.getMessage() for record in caplog.records] == [str(monitor.report)]
    assert monitor.report.bytes_per_step == ACTIVATION_BYTES
    assert monitor.report.last_step <= 60 * every_n_steps


def test_monitor_raises() -> None:
    step, monitor = growing_outputs(), LeakMonitor(1, action="raise")
    with pytest.raises(MemoryLeakError, match=r"outputs\[") as caught:
        run(step, monitor)
    assert caught.value.report is monitor.report


def test_monitor_finds_a_leak_that_starts_late() -> None:
    sound, leak, monitor = plain(), growing_outputs(), LeakMonitor(1)
    assert run(sound, monitor) == []
    assert len(run(leak, monitor)) == 1


@pytest.mark.parametrize("make", [plain, sorted_lengths, cache_by_length])
def test_monitor_stays_quiet(make: Callable[[], Step]) -> None:
    run(make(), LeakMonitor(1, action="raise"), num_steps=100)


def test_monitor_spends_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 50 ms and looks of 10 ms: one look a second."""
    now, looks = [0.0], []

    def look(self: StorageAges, step: int) -> None:
        looks.append(step)
        now[0] += 0.010

    monkeypatch.setattr("hf_memopt.memory.leaks.detect.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(StorageAges, "sample", look)
    monitor = LeakMonitor()
    for _ in range(200):
        now[0] += 0.050
        monitor.step()
    assert looks == [1, 21, 41, 61, 81, 101, 121, 141, 161, 181]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"action": "stop"}, "action='stop' is unknown; use 'warn' or 'raise'"),
    ],
)
def test_monitor_refuses(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LeakMonitor(**options)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps=10 must be at least 24, to tell a leak from a start"):
        detect_leaks(plain(), num_steps=10)


def test_looking_changes_nothing() -> None:
    """Weights and random numbers are bitwise those of a loop that nobody looks at, and nothing stays behind."""

    def trained(look: Callable[[], object]) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = toy()
        for _ in range(5):
            toy_step(model, optimizer)
            look()
        return [*(p.detach() for p in model.parameters()), torch.rand(3)]

    watched, alone = trained(LeakMonitor(1).step), trained(lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))


# --------------------------------------------------------------------------------------------- growth out of reach


def unreached(levels: Iterator[int]) -> float:
    """A loop without a leak in Python, with an allocator that counts `levels`."""
    ages = StorageAges(30, 8, 1024, lambda tensors: next(levels))
    for step in range(1, 47):
        ages.sample(step)
    return ages.unreached_bytes_per_step()


def test_growth_that_only_the_allocator_sees() -> None:
    noise = torch.randint(-300, 300, (100,)).tolist()
    assert unreached(iter(5000 * step + noise[step] for step in range(100))) == pytest.approx(5000, abs=300)


@given(st.lists(st.integers(0, 10**9), min_size=46, max_size=46))
@settings(max_examples=10, deadline=None)
def test_an_allocator_that_goes_up_and_down_is_no_leak(levels: list[int]) -> None:
    assert unreached(iter(levels)) == 0


# ------------------------------------------------------------------------------------------- census and holders


def kinds_of(tensor: Tensor) -> set[str]:
    return {entry.kind for entry in live_storages()[tensor.untyped_storage()._cdata]}


def test_census_finds_what_a_graph_alone_holds() -> None:
    weights = torch.randn(4, 4, requires_grad=True)
    hidden = weights.exp()
    address = hidden.untyped_storage()._cdata
    loss = (hidden * 2).sum()
    del hidden
    held = live_storages()
    assert (held[address][-1].kind, held[address][-1].node) == ("saved for backward", "ExpBackward0")
    assert held[address][-1].root is loss
    del held
    loss.backward()
    assert address not in live_storages()
    assert kinds_of(weights.grad) == {"tensor", "gradient"}


def test_census_unpacks_nothing() -> None:
    """Neither a saved-tensor hook nor a checkpointed region runs because someone looks."""
    calls = []
    hidden = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda p: calls.append("unpack") or p[1]):
        packed = (hidden.exp() * 2).sum()
    recomputed = checkpoint(lambda x: calls.append("forward") or x.exp().sin(), hidden, use_reentrant=False)
    live_storages()
    assert calls == ["forward"]
    (packed + recomputed.sum()).backward()
    assert calls.count("unpack") == 1
    assert calls.count("forward") == 2


def test_census_passes_over_custom_functions_that_backward_freed() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    output = Double.apply(torch.ones(3, requires_grad=True)).sum()
    before = len(live_storages())
    output.backward()
    assert len(live_storages()) <= before  # the saved product is gone, a gradient has come


def test_holder_of_a_tensor_in_a_slot_a_closure_and_a_generator() -> None:
    class Slot:
        __slots__ = ("content",)

    slot = Slot()
    slot.content = [torch.ones(3)]
    holder = describe_holder(slot.content[0])
    assert holder.startswith("slot.content[0], in test_holder_of")

    def enclose() -> Callable[[], Tensor]:
        enclosed = torch.full((7,), 1.0)
        return lambda: enclosed

    def wait() -> Iterator[int]:
        waiting = torch.full((11,), 1.0)
        yield 1
        assert waiting is not None

    function, generator = enclose(), wait()
    next(generator)
    assert holder_of_size(7).startswith("function → enclosed enclosed by test_holder_of")
    assert "generator → waiting of" in holder_of_size(11)
    assert function is not None


def test_the_search_leaves_no_reference_behind() -> None:
    tensor = torch.full((13,), 1.0)
    before = sys.getrefcount(tensor)
    describe_holder(tensor)
    assert sys.getrefcount(tensor) == before


def holder_of_size(size: int) -> str | None:
    found = [entry for entries in live_storages().values() for entry in entries if entry.tensor.shape == (size,)]
    return describe_holder(found[0].tensor, ignore=found)
