import copy
import warnings

import pytest
import torch
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn

from hf_memopt.weights import OffloadedTeacher
from hf_memopt.weights.homes import home as homes

CONFIGS = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
MODES = ("resident", "swap", "stream")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.tied = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.tied(x)


def quantised(config: str) -> Network:
    with warnings.catch_warnings():
        # An escape sequence in torchao's source warns when Python first compiles the source.
        warnings.simplefilter("ignore", SyntaxWarning)
        from torchao import quantization
    torch.manual_seed(0)
    network = Network().eval()
    quantization.quantize_(network, getattr(quantization, config)())
    network.tied.weight = network.layers[0].weight
    return network


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantised_teacher_is_bitwise_the_same(
    config: str, mode: str, home: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = quantised(config)
    with torch.no_grad():
        want = copy.deepcopy(network)(x)
    monkeypatch.setattr(homes, "readable_in_place", lambda master, device: torch.full_like(master, 255))
    copier = AdversarialCopier("random")
    teacher = OffloadedTeacher(network, device="cpu", mode=mode, copier=copier, home=home)
    assert network.tied.weight is network.layers[0].weight
    for _ in range(3):
        with teacher.onload() as module, torch.no_grad():
            assert torch.equal(module(x), want)
        assert mode == "resident" or copier.live_bytes == 0
    plain = sum(p.numel() * 4 for p in Network().parameters())
    moved = teacher.report().bytes_host_to_device
    assert moved == 0 if mode == "resident" else 0 < moved / 3 < plain / 2


def test_quantised_weights_cannot_be_cast(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"'layers.0.weight'; cast the teacher, then quantise it"):
        OffloadedTeacher(quantised(CONFIGS[0]), device="cpu", dtype=torch.bfloat16)


class Params4bit(nn.Parameter):
    """A parameter with part of its value in attributes, as in bitsandbytes."""


class Sharded(torch.Tensor):
    """A tensor that names its inner tensors, of which this rank has only a part, as DTensor does."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "weight",
    [
        Params4bit(torch.zeros(4, dtype=torch.uint8), requires_grad=False),
        nn.Parameter(torch.zeros(4).as_subclass(Sharded), requires_grad=False),
    ],
    ids=["bitsandbytes", "sharded"],
)
def test_weights_that_are_not_understood_are_refused(mode: str, weight: nn.Parameter) -> None:
    module = nn.Module()
    module.odd = weight
    with pytest.raises(ValueError, match=r"frozen weight 'odd'.*quantised with torchao"):
        OffloadedTeacher(module, device="cpu", mode=mode)
