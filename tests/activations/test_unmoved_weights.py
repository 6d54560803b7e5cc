"""Tests that frozen weights, their casts and dequantised copies stay: backward has them again at no cost."""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from adversarial_copier import COPIERS
from architectures import TOKENS, VOCABULARY, Workload, make_model, perturb
from random_plans import RandomPlanner
from torch import Tensor, nn
from weights_at_home import forbid_weights

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations import plan_maker
from hf_memopt.transfer import Copier

pytestmark = [
    pytest.mark.usefixtures("quick_plans"),
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence:SyntaxWarning"),
]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NUM_STEPS = 4  # of which mode "auto" records two


def lora(dtype: torch.dtype = torch.float32) -> Workload:
    from peft import LoraConfig, get_peft_model

    base = make_model("LlamaForCausalLM", **SIZES, vocab_size=VOCABULARY).to(dtype)
    perturb(base)
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    ids = torch.randint(5, VOCABULARY, (3, TOKENS))
    return Workload(model.train(), lambda: model(input_ids=ids, labels=ids).loss)


class Adapted(nn.Module):
    """Frozen linear layers, each with a low-rank adapter."""

    def __init__(self, base: nn.Sequential) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(layer.in_features, 2) for layer in base)
        self.up = nn.ModuleList(nn.Linear(2, layer.out_features) for layer in base)

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x)))
        return x


def adapted(base: nn.Sequential) -> Workload:
    model, x = Adapted(base), torch.randn(5, 32)
    return Workload(model, lambda: model(x).float().square().mean())


def int8() -> Workload:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from torchao's source, when Python first compiles it
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    base = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 40), nn.Linear(40, 32))
    quantize_(base, Int8WeightOnlyConfig())
    return adapted(base)


def nf4() -> Workload:
    layers = pytest.importorskip("bitsandbytes").nn
    sizes = (32, 48, 40, 32)
    makers = [layers.Linear4bit(*pair, quant_type="nf4", compute_dtype=torch.float32) for pair in zip(sizes, sizes[1:])]  # noqa: B905, RUF007
    return adapted(nn.Sequential(*makers).to("cpu"))


WORKLOADS: dict[str, tuple[Callable[[], Workload], bool]] = {
    "LoRA on float32": (lora, False),
    "LoRA on float32, autocast": (lora, True),
    "LoRA on bfloat16": (lambda: lora(torch.bfloat16), False),
    "LoRA on bfloat16, autocast": (lambda: lora(torch.bfloat16), True),
    "int8": (int8, False),
    "int8, autocast": (int8, True),
    "NF4": (nf4, False),
}


def frozen_forms(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parts of quantised weights, and their dequantised forms."""
    for parameter in module.parameters():
        if hasattr(parameter, "__tensor_flatten__"):
            parts = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
            for part in parts:
                if isinstance(part, Tensor):
                    yield part
                    yield part.float()
            yield parameter.dequantize()


def gradients(workload: Workload, autocast: bool, offloader: ActivationOffloader | None) -> list[Tensor]:
    torch.manual_seed(7)
    module = workload.module
    if offloader is None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = workload.loss()
    else:
        with offloader.offload_context(module), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = workload.loss()
    loss.backward()
    found = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    module.zero_grad()
    return found


def check(workload: Workload, autocast: bool, mode: str, copier: Copier) -> None:
    want = gradients(workload, autocast, None)
    assert want
    forbid_weights(copier, workload.module, frozen_forms(workload.module))
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=copier)
    for _ in range(NUM_STEPS):
        got = gradients(workload, autocast, offloader)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0


@pytest.fixture
def any_plan(monkeypatch: pytest.MonkeyPatch) -> RandomPlanner:
    planner = RandomPlanner(random.Random(0))
    monkeypatch.setattr(plan_maker, "make_plan", planner)
    return planner


@pytest.mark.sweep(share=0.1)
@pytest.mark.usefixtures("any_plan")
@pytest.mark.parametrize("copier", ["sync", "late"])
@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_form_of_a_frozen_weight_is_sent_to_the_host(name: str, mode: str, copier: str) -> None:
    torch.manual_seed(0)
    make, autocast = WORKLOADS[name]
    workload = make()
    for parameter in workload.module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)  # LoRA's second factor starts as zero
    check(workload, autocast, mode, COPIERS[copier]())


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.usefixtures("any_plan")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["all", "auto"])
def test_the_frozen_half_of_smolvla_stays(mode: str, autocast: bool, toy_vlm: Path) -> None:
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    from hf_memopt.recipes.reflow.smolvla_toy import POLICY_SETTINGS

    camera = "observation.images.camera"
    config = SmolVLAConfig(
        **POLICY_SETTINGS,
        vlm_model_name=str(toy_vlm),
        device="cpu",
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (4,)),
            camera: PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
    )
    torch.manual_seed(0)
    policy = SmolVLAPolicy(config).train()
    batch = {
        "observation.state": torch.randn(2, 4),
        camera: torch.rand(2, 3, 32, 32),
        "observation.language.tokens": torch.randint(7, 250, (2, 5)),
        "observation.language.attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "action": torch.randn(2, config.chunk_size, 4),
    }
    frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
    assert frozen
    check(Workload(policy, lambda: policy(batch)[0]), autocast, mode, SyncCopier())


def test_a_dequantised_weight_on_its_way_to_the_host_is_noticed() -> None:
    workload, copier = int8(), SyncCopier()
    forbid_weights(copier, workload.module, frozen_forms(workload.module))
    weight = workload.module.base[0].weight.dequantize()
    with pytest.raises(AssertionError, match="a weight was sent"):
        copier.to_host(weight, torch.empty_like(weight))
