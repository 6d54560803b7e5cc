"""Tests that a GPU computes and chooses the same as a CPU, as tables and as rules."""

import attention_choices
import pytest
import torch
from torch import nn


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import slow libraries in the first test, so that collection stays fast."""
    global Darcy, samples, WeightAverage
    from hf_memopt.recipes.fluxflow.model import WeightAverage
    from hf_memopt.recipes.neural_operator.darcy import Darcy, samples


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TABLE = attention_choices.read()
CAPABILITIES = sorted(next(iter(TABLE.values())))


def test_the_table_is_what_torch_chooses_here() -> None:
    capability = torch.cuda.get_device_capability()
    if capability not in CAPABILITIES:
        pytest.skip(f"no column for compute capability {capability}; python tests/attention_choices.py makes one")
    assert not [case for case, kernels in TABLE.items() if attention_choices.chosen(case) != kernels[capability]]


def test_darcy_samples_are_those_of_a_cpu() -> None:
    ours, theirs = (next(samples(Darcy("train", 64, 8), torch.device(name), 8)) for name in ("cuda", "cpu"))
    assert torch.equal(ours[0].cpu(), theirs[0])
    assert (ours[1].cpu() - theirs[1]).abs().max() <= 1e-8 * theirs[1].abs().max()


def test_an_average_in_host_memory_is_that_on_the_gpu() -> None:
    """Check an average of subtractions and multiplications, which IEEE 754 rounds alike on both devices."""
    model = nn.Linear(64, 64, device="cuda")
    averages = [WeightAverage(model, 0.9, torch.device(home)) for home in ("cpu", "cuda")]
    for _ in range(20):
        nn.init.normal_(model.weight)
        for average in averages:
            average.step()
    ours, theirs = (average.state_dict()["shadow_params"][0] for average in averages)
    assert ours.device.type == "cpu"
    torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-6, atol=1e-7)
