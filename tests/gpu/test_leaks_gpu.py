"""Tests that planted leaks of GPU memory are found with their holders, and that an offloader leaks nothing."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from leaky_steps import LEAKS, SOUND, Step, toy

from hf_memopt import ActivationOffloader
from hf_memopt.memory import detect_leaks
from hf_memopt.memory.leaks.live_storages import live_storages
from hf_memopt.transfer.host_memory import pinned_empty

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.leaves_on_device,
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
]


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield
    # A cycle of parameter and gradient goes through C++, where no collector breaks it.
    for entry in [entry for entries in live_storages().values() for entry in entries if entry.kind == "gradient"]:
        entry.root.grad = None
    gc.collect()


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize("name", [name for name in LEAKS if name != "cycle"])  # the garbage collector frees a cycle
def test_a_leak_is_found_and_put_down_to_its_holder(name: str) -> None:
    make, kind, shape, holder = LEAKS[name]
    report = detect_leaks(make())
    assert report.leaking
    holders = [culprit.held_by for culprit in report.culprits if (culprit.kind, culprit.shape) == (kind, shape)]
    assert any(holder in each for each in holders), str(report)


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize("make", SOUND)
def test_a_sound_loop_is_not_complained_of(make: Callable[[], Step]) -> None:
    report = detect_leaks(make())
    assert not report.leaking, str(report)


def test_page_locked_memory_that_is_kept_is_found() -> None:
    kept = []
    report = detect_leaks(lambda: kept.append(pinned_empty(4096, torch.device("cuda"))))
    assert report.leaking
    assert any("kept[" in culprit.held_by for culprit in report.culprits), str(report)


@pytest.mark.parametrize("options", [{"mode": "all"}, {"mode": "auto", "budget_gib": 1e-4}], ids=["all", "auto"])
def test_an_offloader_does_not_leak(options: dict[str, object]) -> None:
    model, optimizer = toy()
    offloader = ActivationOffloader(offload_threshold_mb=0, **options)

    def step() -> None:
        with offloader.offload_context(model):
            loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    report = detect_leaks(step)
    assert not report.leaking, str(report)
    assert offloader.stats.bytes_moved > 0
