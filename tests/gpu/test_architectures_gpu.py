"""Bitwise comparison of every architecture's offloaded gradients with the plain run's, on a device with streams."""

import functools
import random
from collections.abc import Iterator

import pytest
import torch
from architectures import ARCHITECTURES, equal, gradients
from fake_cuda.device import is_loaded
from own_architectures import OWN_ARCHITECTURES
from random_plans import RandomPlanner

from hf_memopt import ActivationOffloader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]

ALL = ARCHITECTURES | OWN_ARCHITECTURES

# Operations of these architectures that no CPU can do in the place of a GPU.
NOT_ON_A_FAKE_GPU = {
    **dict.fromkeys(["gru", "lstm", "lstm_with_projections", "packed_gru"], "cuDNN's recurrent layers"),
    **dict.fromkeys(["cells", "message_passing"], "fused recurrent cells"),
    **dict.fromkeys(["graph_convolutions_coo", "graph_convolutions_csr"], "cuSPARSE"),
    **dict.fromkeys(["mixtral", "qwen3_moe"], "grouped matrix products in float32"),
}


@functools.cache
def import_what_it_needs(name: str) -> None:
    """Build the architecture on the CPU once: some libraries make tensors at import and keep them."""
    ALL[name].build()


@pytest.fixture(autouse=True)
def on_gpu(name: str) -> Iterator[None]:
    if is_loaded() and name in NOT_ON_A_FAKE_GPU:
        pytest.skip(f"the fake GPU has no {NOT_ON_A_FAKE_GPU[name]}")
    import_what_it_needs(name)
    with torch.device("cuda"):
        yield


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_all_that_is_saved_travels(name: str, autocast: bool) -> None:
    if autocast and name == "fno":
        pytest.skip("cuFFT knows no bfloat16, and CUDA's autocast lets it have some")
    workload = ALL[name].build()
    want = gradients(workload, autocast=autocast)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0)
    for _ in range(2):
        assert equal(gradients(workload, autocast, offloader), want)
    assert offloader.stats.bytes_moved > 0


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].can_checkpoint])
def test_inputs_of_checkpoints_travel(name: str) -> None:
    workload = ALL[name].build()
    workload.checkpoint()
    want = gradients(workload)
    offloader = ActivationOffloader(mode="inputs", offload_threshold_mb=0)
    for _ in range(2):
        assert equal(gradients(workload, offloader=offloader), want)
    assert offloader.stats.bytes_moved > 0


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize(("index", "name"), list(enumerate(ALL)))
def test_any_plan_is_followed(index: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.activations.plan_maker.make_plan", RandomPlanner(random.Random(index)))
    workload = ALL[name].build()
    want = gradients(workload)
    offloader = ActivationOffloader(mode="auto", offload_threshold_mb=0)
    for _ in range(4):  # the first two passes are recorded, with a plan made after each
        assert equal(gradients(workload, offloader=offloader), want)
