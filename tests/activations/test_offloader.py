"""ActivationOffloader: bitwise gradients whatever is saved and whenever copies happen, and nothing left behind."""

import _thread
import copy
import gc
import logging
import pickle
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from adversarial_copier import AdversarialCopier, InjectedError
from gradients import equal, take_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_S
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt.activations import ActivationOffloader, wrap_forward_with_offload
from hf_memopt.activations import offloader as offloader_module
from hf_memopt.activations.saved_tensors.pack_hook import OffloadContext
from hf_memopt.activations.saved_tensors.packed import Restored
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.host_arena import HostArena

COPIERS: dict[str, Callable[[], Copier]] = {
    "sync": SyncCopier,
    "early": lambda: AdversarialCopier("early"),
    "late": lambda: AdversarialCopier("late"),
    "random": lambda: AdversarialCopier("random"),
}

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest) -> Copier:
    return COPIERS[request.param]()


@pytest.fixture
def make(copier: Copier) -> Callable[..., ActivationOffloader]:
    return lambda **options: ActivationOffloader(
        **{"offload_threshold_mb": 0, "mode": "all", "copier": copier, **options}
    )


@pytest.fixture
def decoder() -> nn.Module:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).train()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("prefetch_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_bitwise_the_plain_ones(
    decoder: nn.Module, tokens: Tensor, make: Any, prefetch_ahead: int, autocast: bool
) -> None:
    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return language_loss(decoder, tokens)

    loss().backward()
    want = take_gradients(decoder)
    offloader = make(prefetch_ahead=prefetch_ahead)
    allocations = []
    for _ in range(4):
        with offloader.offload_context(decoder):
            value = loss()
        value.backward()
        assert equal(take_gradients(decoder), want)
        allocations.append(offloader.stats.num_host_allocations)
    assert allocations[1] == allocations[3] > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_regions_offload_their_inputs(
    decoder: nn.Module, tokens: Tensor, make: Any, use_reentrant: bool
) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    plain, checkpointed = make(), make()
    with plain.offload_context(decoder):
        language_loss(decoder, tokens).backward()
    decoder.zero_grad()
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    moved = plain.stats.bytes_moved
    with checkpointed.offload_context(decoder):
        loss = language_loss(decoder, tokens)
    loss.backward()
    assert equal(take_gradients(decoder), want)
    assert 0 < checkpointed.stats.bytes_moved < moved


def pack(offloader: ActivationOffloader, tensor: Tensor) -> Any:
    """What the hook of a context returns, without giving up the tensor's memory."""
    context = OffloadContext(offloader._threshold_bytes, frozenset(), offloader._new_pass, offloader._counters)
    return context.pack(tensor)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64]))
    size = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    stride = [draw(st.integers(0, 9)) for _ in size]
    view = torch.arange(1, 201).to(dtype).as_strided(size, stride, draw(st.integers(0, 50)))
    if dtype.is_complex:
        view = view * (1 + 2j) if draw(st.booleans()) else view.conj() if draw(st.booleans()) else view
        if draw(st.booleans()):
            view = view.imag
    return view


@pytest.mark.parametrize("num_examples", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_view_comes_back_as_it_was(num_examples: int) -> None:
    returns = given(views(), st.sampled_from(sorted(COPIERS)), st.booleans())(comes_back_as_it_was)
    settings(max_examples=num_examples)(returns)()


def comes_back_as_it_was(view: Tensor, copier: str, leaves: bool) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=COPIERS[copier]())
    want = view.clone(), view.stride(), view.is_conj(), view.is_neg()
    payload = offloader.offload_tensor(view) if leaves else pack(offloader, view)
    got = offloader.fetch_tensor(payload)
    assert torch.equal(got, want[0])
    assert (got.stride(), got.is_conj(), got.is_neg()) == want[1:]


# ------------------------------------------------------------------------------------------------ autograd's corners


def plain_and_offloaded(make: Any, function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    want = function()
    with make().offload_context():
        got = function()
    return want, got


def test_complex_transposed_expanded_and_sliced_saves(make: Any) -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.randn(8, 8, dtype=torch.cfloat, requires_grad=True)
        w = torch.randn(8, 8, requires_grad=True)
        z = x @ x.conj().t()
        a = (w @ w.t()) * w.t()
        loss = (z * z.conj()).real.sum() + (w[3:4].expand(8, 8) * a).sum() + torch.tanh(w[1:, 2:]).sum()
        loss.backward()
        return [x.grad, w.grad]

    want, got = plain_and_offloaded(make, gradients)
    assert equal(want, got)


def test_double_backward(make: Any) -> None:
    def penalty() -> list[Tensor]:
        torch.manual_seed(1)
        layer = nn.Linear(8, 8)
        x = torch.randn(4, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(torch.tanh(layer(x) @ layer(x).t()).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, layer.weight.grad]

    want, got = plain_and_offloaded(make, penalty)
    assert equal(want, got)


def test_retained_graphs_and_two_forwards_in_flight(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    offloader = make()
    with offloader.offload_context(decoder):
        first = language_loss(decoder, tokens)
    with offloader.offload_context(decoder):
        second = language_loss(decoder, tokens.flip(1))
    first.backward(retain_graph=True)
    assert equal(take_gradients(decoder), want)
    second.backward()
    decoder.zero_grad()
    first.backward()
    assert equal(take_gradients(decoder), want)
    del first, second
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("threshold_mb", [0, 1])
def test_in_place_modification_raises_as_in_eager(make: Any, threshold_mb: float) -> None:
    w = torch.randn(8, 8, requires_grad=True)
    h = torch.randn(8, 8)
    with make(offload_threshold_mb=threshold_mb).offload_context():
        loss = (h * w).sum()
        h.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_storage_is_copied_once_and_a_recycled_address_is_a_new_one(make: Any) -> None:
    offloader = make()
    w = torch.randn(16, 16, requires_grad=True)
    with offloader.offload_context():
        h = torch.tanh(w * 2)
        (h * h.t() + h[1:].sum() * h).sum().backward()
    assert offloader.stats.bytes_moved <= 16 * 16 * 4 * 4
    assert offloader.stats.bytes_deduplicated >= 16 * 16 * 4 * 2
    for step in range(50):  # the allocator hands out the same addresses again and again
        x = torch.full((4, 4), float(step), requires_grad=True)
        with offloader.offload_context():
            y = (x.detach() * x).sum()
        y.backward()
        assert torch.equal(x.grad, x.detach())


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_weights_never_move(
    decoder: nn.Module, tokens: Tensor, make: Any, autocast: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[Tensor, Any]] = []
    offloader = make()
    original = OffloadContext.pack

    def recording(context: OffloadContext, tensor: Tensor) -> Any:
        payload = original(context, tensor)
        packed.append((tensor.detach(), payload))
        return payload

    monkeypatch.setattr(OffloadContext, "pack", recording)
    with offloader.offload_context(decoder if known else None), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        language_loss(decoder, tokens)
    moved = [tensor for tensor, payload in packed if isinstance(payload, Restored) and tensor.is_floating_point()]
    assert moved
    sums = {p.to(torch.bfloat16 if autocast else p.dtype).sum().item() for p in decoder.parameters() if p.ndim == 2}
    assert not any(tensor.sum().item() in sums for tensor in moved if tensor.ndim == 2)


def test_buffers_of_the_model_never_move(make: Any) -> None:
    norm = nn.BatchNorm1d(8).eval()
    offloader = make()
    with offloader.offload_context(norm):
        norm(torch.randn(4, 8)).sum()
    assert offloader.stats.bytes_moved == 4 * 8 * 4


# ------------------------------------------------------------------------------------------------ lifetime


def test_nothing_is_left_after_a_dropped_graph_or_an_exception(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    offloader = make()
    with offloader.offload_context(decoder):
        loss = language_loss(decoder, tokens)
    assert offloader.stats.host_bytes_live > 0
    del loss
    gc.collect()
    assert offloader.stats.host_bytes_live == 0
    with pytest.raises(IndexError), offloader.offload_context(decoder):
        language_loss(decoder, tokens + 1000)
    gc.collect()
    assert offloader.stats.host_bytes_live == 0
    x = torch.randn(4, requires_grad=True)
    (x * x).sum().backward()  # no hook is left
    assert offloader.stats.host_bytes_live == 0


def test_a_fault_in_any_copy_or_wait_leaves_the_next_step_right(
    tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)  # payloads wait as they die
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(4, 8)
    model(x).sum().backward()
    want = take_gradients(model)
    counter = AdversarialCopier("late")
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=counter)
    with offloader.offload_context(model):
        loss = model(x).sum()
    loss.backward()
    take_gradients(model)
    for fail_at in range(1, counter.num_operations + 1):
        copier = AdversarialCopier("late", 0, fail_at)
        offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=copier)
        for attempt in range(2):
            try:
                with offloader.offload_context(model):
                    loss = model(x).sum()
                loss.backward()
            except InjectedError:
                assert attempt == 0
                model.zero_grad()
                continue
            assert equal(take_gradients(model), want)
        del loss
        gc.collect()
        assert offloader.stats.host_bytes_live == 0


def test_three_hundred_steps_keep_memory_flat(make: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    offloader = make()
    sizes = []
    for step in range(300):
        with offloader.offload_context(model):
            loss = model(torch.randn(4 + step % 3, 16)).sum()
        loss.backward()
        sizes.append((offloader.stats.host_bytes_pinned, offloader.stats.num_host_allocations))
    assert sizes[5] == sizes[-1]


# ------------------------------------------------------------------------------------------------ host memory


def test_the_budget_is_never_exceeded_and_gradients_stay_exact(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    offloader = make(host_budget_gib=100_000 / 2**30)
    for _ in range(2):
        with offloader.offload_context(decoder):
            loss = language_loss(decoder, tokens)
        assert offloader.stats.host_bytes_pinned <= 100_000
        loss.backward()
        assert equal(take_gradients(decoder), want)
    assert offloader.stats.bytes_kept > 0


# ------------------------------------------------------------------------------------------------ use


def test_wrap_survives_copies_pickles_and_exceptions(decoder: nn.Module, tokens: Tensor, make: Any) -> None:
    language_loss(decoder, tokens).backward()
    want = take_gradients(decoder)
    keys = set(decoder.state_dict())
    handle = make().wrap(decoder)
    for model in (decoder, copy.deepcopy(decoder)):
        language_loss(model, tokens).backward()
        assert equal(take_gradients(model), want)
        with pytest.raises(IndexError):
            language_loss(model, tokens + 1000)
    assert set(decoder.state_dict()) == keys
    handle.remove()
    assert not decoder._forward_pre_hooks
    assert not decoder._forward_hooks
    assert handle.offloader.stats.bytes_moved > 0
    gc.collect()
    assert handle.offloader.stats.host_bytes_live == 0


def test_a_wrapped_module_pickles() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ActivationOffloader(offload_threshold_mb=0, mode="all", copier=SyncCopier()).wrap(model)
    clone = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 4)
    assert torch.equal(clone(x), model(x))


def test_wrap_forward_with_offload_is_the_same_function(copier: Copier) -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    torch.tanh(layer(x)).sum().backward()
    want = take_gradients(layer)
    forward = wrap_forward_with_offload(layer.forward, mode="all", offload_threshold_mb=0, copier=copier)
    torch.tanh(forward(x)).sum().backward()
    assert equal(take_gradients(layer), want)
    assert copier.bytes_to_host == x.nbytes


def test_disabled_or_on_the_cpu_nothing_moves(decoder: nn.Module, tokens: Tensor) -> None:
    for options in ({"enabled": False, "copier": SyncCopier()}, {}):
        offloader = ActivationOffloader(offload_threshold_mb=0, **options)
        with offloader.offload_context(decoder):
            language_loss(decoder, tokens).backward()
        assert offloader.stats.bytes_moved == 0


def test_a_context_inside_a_checkpointed_region_is_exact(make: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    torch.tanh(layer(x)).sum().backward()
    want = [x.grad.clone(), *take_gradients(layer)]
    x.grad = None
    offloader = make()

    def block(y: Tensor) -> Tensor:
        with offloader.offload_context(layer):
            return torch.tanh(layer(y))

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert equal([x.grad, *take_gradients(layer)], want)


@pytest.mark.parametrize("option", [{"offload_threshold_mb": -1}, {"prefetch_ahead": -1}, {"host_budget_gib": -1}])
def test_bad_options_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        ActivationOffloader(**option)


def test_the_log_says_what_host_memory_is_taken_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    arena = HostArena(SyncCopier())
    with caplog.at_level(logging.INFO, "hf_memopt"):
        blocks = [arena.acquire(2**20) for _ in range(512)]
        arena.log_growth()
        arena.log_growth()
        for block in blocks:
            assert block is not None
            arena.release(block)
        arena.trim()
        arena.trim()
    taken, given_back = (record.message for record in caplog.records)
    assert re.fullmatch(
        r"activation offloading: took 0\.50 GiB of host memory in \d+\.\d s, holds 0\.50 GiB in 512 allocations; .*",
        taken,
    )
    assert given_back.startswith("activation offloading: gave 0.50 GiB of host memory back")


def test_everything_is_kept_while_a_cuda_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    offloader_module._say_captured.cache_clear()
    copier = AdversarialCopier()
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier)
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "hf_memopt"):
        for _ in range(2):
            with offloader.offload_context(model):
                model(torch.ones(2, 4)).tanh().sum().backward()
    assert copier.num_operations == 0
    assert [record.message for record in caplog.records] == [
        "activation offloading: everything stays on the device while a CUDA graph is captured"
    ]


def test_threads_without_python_frames_save_tensors() -> None:
    """As autograd's thread of an accelerator does in a backward pass that is to be differentiated."""
    tensor, packed = torch.randn(4), []
    with ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier()).offload_context():
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    _thread.start_new_thread(packed.extend, (map(pack, [tensor]),))
    deadline = time.monotonic() + HANG_S
    while not packed and time.monotonic() < deadline:
        time.sleep(0.01)
    (payload,) = packed
    assert torch.equal(unpack(payload), tensor)
