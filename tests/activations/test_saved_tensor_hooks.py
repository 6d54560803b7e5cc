"""Tests that the hooks restore any view that autograd saves, and leave weights on the device."""

import _thread
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversarial_copier import COPIERS
from gradients import equal, language_loss, take_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_S
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations.saved_tensor_hooks import MovedView, SavedTensorHooks


def pack(offloader: ActivationOffloader, tensor: Tensor) -> Any:
    """Return a context and the result of its hook, without releasing the tensor's memory."""
    context = SavedTensorHooks(
        offloader._threshold_bytes,
        frozenset(),
        lambda device: offloader._begin_pass(None, device, None),
        offloader._counters,
        offloader._lock,
    )
    return context, context.pack(tensor)


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
    context, payload = pack(offloader, view)
    if leaves and isinstance(payload, MovedView):
        payload._storage.let_go()
    got = context.unpack(payload)
    assert torch.equal(got, want[0])
    assert (got.stride(), got.is_conj(), got.is_neg()) == want[1:]


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


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_weights_never_move(
    decoder: nn.Module, tokens: Tensor, make: Any, autocast: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[Tensor, Any]] = []
    offloader = make()
    original = SavedTensorHooks.pack

    def recording(context: SavedTensorHooks, tensor: Tensor) -> Any:
        payload = original(context, tensor)
        packed.append((tensor.detach(), payload))
        return payload

    monkeypatch.setattr(SavedTensorHooks, "pack", recording)
    with offloader.offload_context(decoder if known else None), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        language_loss(decoder, tokens)
    moved = [tensor for tensor, payload in packed if isinstance(payload, MovedView) and tensor.is_floating_point()]
    assert moved
    sums = {p.to(torch.bfloat16 if autocast else p.dtype).sum().item() for p in decoder.parameters() if p.ndim == 2}
    assert not any(tensor.sum().item() in sums for tensor in moved if tensor.ndim == 2)


def test_buffers_of_the_model_never_move(make: Any) -> None:
    norm = nn.BatchNorm1d(8).eval()
    offloader = make()
    with offloader.offload_context(norm):
        norm(torch.randn(4, 8)).sum()
    assert offloader.stats.bytes_moved == 4 * 8 * 4


def test_threads_without_python_frames_save_tensors() -> None:
    """Save from a thread like autograd's for an accelerator, in a backward that is differentiated itself."""
    tensor, packed = torch.randn(4), []
    with ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier()).offload_context():
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    _thread.start_new_thread(packed.extend, (map(pack, [tensor]),))
    deadline = time.monotonic() + HANG_S
    while not packed and time.monotonic() < deadline:
        time.sleep(0.01)
    (payload,) = packed
    assert torch.equal(unpack(payload), tensor)
