"""Selective checkpointing: bitwise gradients, exactly the bytes that a policy keeps, and nothing recomputed in vain."""

import copy
import gc
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.checkpointing import SelectiveCheckpoint, apply_selective_checkpointing
from hf_memopt.activations.kept_outputs import may_be_kept
from hf_memopt.memory import SavedBytes
from hf_memopt.transfer import SyncCopier

POLICIES = ["heavy_ops", "all", "alternate"]


def keep_everything(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return True


# ------------------------------------------------------------------------------------------------ models


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.norm(self.conv(x).relu_()), 0.1, self.training)


class ConvNet(nn.Module):
    """Writes in place what the policy keeps, as many networks do."""

    def __init__(self, block: type[nn.Module] = ConvBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        attention_dropout=0.1,
    )
    return transformers.Qwen3ForCausalLM(config).train()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        num_labels=4,
    )
    return transformers.ViTForImageClassification(config).train()


TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
MAPS = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "qwen3": (qwen3, lambda model: model(input_ids=TOKENS, labels=TOKENS).loss),
    "vit": (vit, lambda model: model(pixel_values=IMAGES, labels=torch.tensor([0, 3])).loss),
    "conv": (ConvNet, lambda model: model(MAPS)),
}


@pytest.fixture(params=MODELS)
def model_and_loss(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    make, loss = MODELS[request.param]
    torch.manual_seed(0)
    return make(), loss


def gradients(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], context: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    torch.manual_seed(4)
    with context or nullcontext():
        value = loss(model)
    value.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def offloader(copier: Any = None) -> ActivationOffloader:
    return ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier or SyncCopier())


# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policy", [*POLICIES, keep_everything])
def test_gradients_are_bitwise_the_plain_ones(model_and_loss: Any, policy: Any, autocast: bool) -> None:
    model, loss = model_and_loss

    def value(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(model)

    want = gradients(model, value)
    apply_selective_checkpointing(model, policy)
    assert equal(gradients(model, value), want)
    assert equal(gradients(model, value, offloader().offload_context(model)), want)


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_gradients_whenever_copies_happen(policy: str, schedule: str) -> None:
    model, loss = qwen3(), MODELS["qwen3"][1]
    want = gradients(model, loss)
    apply_selective_checkpointing(model, policy)
    offloading = offloader(AdversarialCopier(schedule))
    for _ in range(3):
        assert equal(gradients(model, loss, offloading.offload_context(model)), want)
    assert offloading.stats.bytes_moved > 0
    assert offloading.stats.host_bytes_live == 0


@pytest.mark.parametrize("policy", [*POLICIES, keep_everything])
@pytest.mark.parametrize("offloaded", [False, True])
def test_several_backwards_and_double_backward(policy: Any, offloaded: bool) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return dropout(torch.tanh(x @ w), 0.5) @ w.T

    def run(region: Callable[[Tensor], Tensor], context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        with context:
            y = region(x).sin()
        once = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        again = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        penalty = sum(g.square().sum() for g in again)
        return [*once, *again, *torch.autograd.grad(penalty, [x, w])]

    want = run(region, nullcontext())
    context = offloader().offload_context() if offloaded else nullcontext()
    assert equal(run(lambda x: SelectiveCheckpoint(policy)(region, x), context), want)


def test_random_operations_are_recomputed() -> None:
    """Whatever the policy says: the dropout that follows has to draw the same numbers again."""

    def region(x: Tensor) -> Tensor:
        return dropout(torch.rand_like(x) * x, 0.5).exp()

    x = torch.ones(100, requires_grad=True)
    found = []
    for run in (region, lambda x: SelectiveCheckpoint(keep_everything)(region, x)):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(run(x).sum(), [x])[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("operation", "before"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention.default, 3),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, 5),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, 5),
    ],
)
def test_attention_is_kept_unless_it_drops_out(operation: Any, before: int) -> None:
    """These kernels are for accelerators; that recomputation runs them again is all that dropout takes."""
    query_to_dropout = (None,) * before
    assert may_be_kept(operation, query_to_dropout, {})
    assert may_be_kept(operation, (*query_to_dropout, 0.0), {})
    assert may_be_kept(operation, query_to_dropout, {"dropout_p": 0.0})
    assert not may_be_kept(operation, (*query_to_dropout, 0.1), {})
    assert not may_be_kept(operation, query_to_dropout, {"dropout_p": 0.1})


def test_views_and_writes_are_recomputed() -> None:
    aten = torch.ops.aten
    assert may_be_kept(aten.mm.default, (), {})
    for operation in (aten.t.default, aten.mm.out, aten.relu_.default, aten._foreach_mul_.Scalar):
        assert not may_be_kept(operation, (), {})


# ------------------------------------------------------------------------------------------------ bytes and operations

N, D = 4, 8
UNIT = N * D * 4  # bytes of (N, D) in fp32


class Mlp(nn.Module):
    """tanh(gelu(x W) V): two matrix products of F operations together, and tanh, which saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(gelu(self.up(x))))


F = 2 * N * D * 4 * D + 2 * N * 4 * D * D

# Saved: plain x, up(x), its gelu, tanh's output. Multiples of F: forward, backward with both gradients, recomputed.
EXACT = {
    None: (1 + 4 + 4 + 1, 1 + 2 + 0),
    "all": (1, 1 + 2 + 1),
    "heavy_ops": (1 + 4 + 1, 1 + 2 + 0),
    "alternate": (1 + 4, 1 + 2 + 0.5),
}


def run_mlp(policy: str | None, mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp(x) if policy is None else SelectiveCheckpoint(policy)(mlp, x)


@pytest.mark.parametrize("policy", EXACT)
def test_saved_bytes(policy: str | None) -> None:
    mlp, x = Mlp(), torch.randn(N, D, requires_grad=True)
    with SavedBytes(mlp.parameters()) as saved:
        run_mlp(policy, mlp, x)
    assert saved.total_bytes == EXACT[policy][0] * UNIT


@pytest.mark.parametrize("policy", EXACT)
def test_offloaded_bytes_are_all_the_saved_ones(policy: str | None) -> None:
    mlp, x = Mlp(), torch.randn(N, D, requires_grad=True)
    offloading = offloader()
    with offloading.offload_context(mlp):
        y = run_mlp(policy, mlp, x)
    assert offloading.stats.bytes_moved == EXACT[policy][0] * UNIT
    y.sum().backward()
    assert offloading.stats.host_bytes_live == 0


@pytest.mark.parametrize("policy", EXACT)
def test_operations(policy: str | None) -> None:
    mlp, x = Mlp(), torch.randn(N, D, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        run_mlp(policy, mlp, x).sum().backward()
    assert flops.get_total_flops() == EXACT[policy][1] * F


class Operations(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "recomputed"), [("heavy_ops", 0), ("alternate", 1), ("all", 2)])
@pytest.mark.parametrize(
    ("operation", "region"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", scaled_dot_product_attention),
        ("aten::convolution", lambda x, y, z: torch.conv2d(x, y[:, :, :1, :1])),
        ("aten::bmm", lambda x, y, z: x @ y.mT),
        ("aten::baddbmm", lambda x, y, z: torch.baddbmm(x[0], y[0], z[0, :, :4, :4])[None]),
    ],
)
def test_heavy_operations_recomputed(policy: str, recomputed: int, operation: str, region: Any) -> None:
    x = torch.randn(2, 2, 4, 4, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return region(region(x, x, x).exp(), x, x).exp()

    y = SelectiveCheckpoint(policy)(twice, x).sum()
    with Operations() as operations, torch.autograd.set_multithreading_enabled(False):
        y.backward()
    in_backward = 2 if operation == "aten::bmm" else 0
    assert operations.counts["aten::exp"] == 2
    assert operations.counts[operation] - 2 * in_backward == recomputed


def test_what_the_region_modifies_in_place_is_recomputed() -> None:
    linear = nn.Linear(D, D)
    x = torch.randn(N, D, requires_grad=True)
    with SavedBytes(linear.parameters()) as saved:
        SelectiveCheckpoint()(lambda x: linear(x).relu_().exp(), x)
    assert saved.total_bytes == UNIT  # x


@pytest.mark.parametrize("offloaded", [False, True])
def test_what_is_modified_after_the_region_raises(offloaded: bool) -> None:
    x = torch.randn(N, D, requires_grad=True)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x.T
        return product, product.exp()

    with offloader().offload_context() if offloaded else nullcontext():
        product, y = SelectiveCheckpoint()(region, x)
    product.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------ calls


def test_arguments_pass_through_and_are_saved_wherever_they_are() -> None:
    def region(x: Tensor, *, debug: str, pair: tuple[Tensor, list[Tensor]], context_fn: None) -> dict[str, Any]:
        return {"y": (x * pair[0]).exp() * pair[1][0], "debug": debug, "context_fn": context_fn}

    tensors = [torch.randn(N, D, requires_grad=True) for _ in range(3)]
    pair = tensors[1], [tensors[2]]
    plain = region(tensors[0], debug="text", pair=pair, context_fn=None)
    want = torch.autograd.grad(plain["y"].sum(), tensors)
    with SavedBytes() as saved:
        output = SelectiveCheckpoint("all")(region, tensors[0], debug="text", pair=pair, context_fn=None)
    assert output.keys() == plain.keys()
    assert output["debug"] == "text"
    assert equal(torch.autograd.grad(output["y"].sum(), tensors), want)
    assert saved.total_bytes == 3 * UNIT


def test_without_gradients_it_is_a_plain_call() -> None:
    class Counting(nn.BatchNorm1d):
        pass

    module = Counting(D)
    with torch.no_grad():
        y = SelectiveCheckpoint()(module, torch.randn(N, D))
    assert not y.requires_grad
    assert module.num_batches_tracked == 1


def test_a_policy_function_is_asked_once_per_operation() -> None:
    asked: list[str] = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> torch.utils.checkpoint.CheckpointPolicy:
        assert not context.is_recompute
        asked.append(operation.name())
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(N, D, requires_grad=True)
    SelectiveCheckpoint(policy)(lambda x: (x.detach() * x).exp(), x).sum().backward()
    assert asked == ["aten::mul.Tensor", "aten::exp"]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"policy='heavy' is unknown; use one of \['all', 'alternate', 'heavy_ops'\]"):
        SelectiveCheckpoint("heavy")


class InjectedError(RuntimeError):
    pass


@pytest.mark.parametrize("ending", ["backward", "retained", "dropped", "exception"])
def test_nothing_is_held(ending: str) -> None:
    products: list[StorageWeakRef] = []

    def region(x: Tensor) -> Tensor:
        product = x @ x.T
        products.append(StorageWeakRef(product.untyped_storage()))
        if ending == "exception":
            raise InjectedError
        return product.exp().exp()

    def run() -> None:
        try:
            y = SelectiveCheckpoint()(region, torch.randn(N, D, requires_grad=True))
        except InjectedError:
            return
        if ending in ("backward", "retained"):
            y.sum().backward(retain_graph=ending == "retained")

    run()
    gc.collect()
    assert products
    assert all(product.expired() for product in products)


def test_recomputed_tensors_do_not_outlive_a_backward() -> None:
    waves: list[StorageWeakRef] = []

    def region(x: Tensor) -> Tensor:
        wave = x.sin()
        waves.append(StorageWeakRef(wave.untyped_storage()))
        return (wave @ wave.T).exp()

    y = SelectiveCheckpoint()(region, torch.randn(N, D, requires_grad=True))
    y.sum().backward(retain_graph=True)
    gc.collect()
    assert [wave.expired() for wave in waves] == [True, True]


# ------------------------------------------------------------------------------------------------ written buffers


class Counter1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Replacing(Counter1):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


WRITERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.BatchNorm2d(4), "'1' .BatchNorm2d. in Sequential .*'running_mean'"),
    "instance norm": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d.*'running_mean'"),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
        "_SpectralNorm.*'_u'",
    ),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)), "'1' .Conv2d.*'weight_u'"),
    "own counter": (Counter1, "'1' .Counter1.*'calls'"),
    "replaced buffer": (Replacing, "'1' .Replacing.*'calls'"),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")  # the old one still is in many checkpoints
@pytest.mark.parametrize("writer", WRITERS)
def test_modules_that_write_buffers_are_refused(writer: str) -> None:
    make, complaint = WRITERS[writer]
    block = nn.Sequential(nn.Conv2d(4, 4, 1), make()).train()
    with pytest.raises(ValueError, match=complaint):
        SelectiveCheckpoint()(block, MAPS)
    with pytest.raises(ValueError, match=complaint):
        SelectiveCheckpoint()(block.forward, MAPS)


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm2d(4).eval(), lambda: nn.InstanceNorm2d(4), lambda: nn.GroupNorm(2, 4)]
)
def test_normalisation_without_statistics_to_write_is_not_refused(make: Callable[[], nn.Module]) -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), make())
    want = gradients(block, lambda block: block(MAPS).exp().sum())
    assert equal(gradients(block, lambda block: SelectiveCheckpoint()(block, MAPS).exp().sum()), want)


# ------------------------------------------------------------------------------------------------ whole models


def test_repeated_blocks_are_found(model_and_loss: Any) -> None:
    model, loss = model_and_loss
    plain = SavedBytes(model.parameters())
    gradients(model, loss, plain)
    handle = apply_selective_checkpointing(model, "all")
    names = {"Qwen3ForCausalLM": "model.layers", "ViTForImageClassification": "vit.encoder.layer", "ConvNet": "blocks"}
    prefix = names[type(model).__name__]
    assert handle.names == tuple(f"{prefix}.{i}" for i in range(len(handle.names)))
    assert len(handle.names) == len(model.get_submodule(prefix))
    checkpointed = SavedBytes(model.parameters())
    gradients(model, loss, checkpointed)
    assert checkpointed.total_bytes < plain.total_bytes
    handle.remove()
    removed = SavedBytes(model.parameters())
    gradients(model, loss, removed)
    assert removed.total_bytes == plain.total_bytes
    assert not any("forward" in vars(module) for module in model.modules())


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def torch_saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, torch_saved])
@pytest.mark.parametrize("policy", ["heavy_ops", keep_everything])
def test_copies_are_checkpointed_by_themselves(duplicate: Callable[[Any], Any], policy: Any) -> None:
    model, loss = qwen3(), MODELS["qwen3"][1]
    want = gradients(model, loss)
    handle = apply_selective_checkpointing(model, policy)
    saved = SavedBytes(model.parameters())
    gradients(model, loss, saved)
    twin, twin_handle = duplicate((model, handle))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    twin_saved = SavedBytes(twin.parameters())
    assert equal(gradients(twin, loss, twin_saved), want)
    assert twin_saved.total_bytes == saved.total_bytes
    twin_handle.remove()
    assert not any("forward" in vars(module) for module in twin.modules())
    assert all("forward" in vars(model.get_submodule(name)) for name in handle.names)


def test_state_and_class_stay(tmp_path: Path) -> None:
    model = qwen3()
    before = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    handle = apply_selective_checkpointing(model)
    assert model.state_dict().keys() == before.keys()
    assert [type(module) for module in model.modules()] == classes
    model.save_pretrained(tmp_path)
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert not any("forward" in vars(module) for module in loaded.modules())
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    model.load_state_dict(before)
    handle.remove()
    handle.remove()


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_evaluation_runs_plainly(mode: str) -> None:
    model = ConvNet().train(mode != "eval")
    torch.manual_seed(0)
    want = model(MAPS)
    apply_selective_checkpointing(model)
    torch.manual_seed(0)
    with Operations() as operations, torch.set_grad_enabled(mode == "eval"), SavedBytes() as saved:
        assert torch.equal(model(MAPS), want)
    assert operations.counts["aten::convolution"] == 3
    assert (saved.total_bytes > 0) == (mode == "eval")
    if mode == "eval":
        assert saved.total_bytes > 3 * MAPS.nbytes  # more than the blocks' inputs


def test_generation_keeps_its_cache() -> None:
    model = qwen3().eval()
    want = model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    apply_selective_checkpointing(model)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0), want)


def test_a_cache_that_is_passed_by_position_is_left_out_too() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=96, n_positions=32, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()

    def loss(model: Any) -> Tensor:
        torch.manual_seed(1)  # of dropout
        return model(TOKENS, labels=TOKENS).loss

    want = gradients(model, loss)  # without a cache, whose keys have other strides and round otherwise
    model.config.use_cache = True
    apply_selective_checkpointing(model)
    assert equal(gradients(model, loss), want)


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ([ConvBlock], ("blocks.0", "blocks.1", "blocks.2")),
        (ConvBlock, ("blocks.0", "blocks.1", "blocks.2")),
        (["GroupNorm"], ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")),
        (["blocks.1", "blocks.1.conv", "blocks.2.norm"], ("blocks.1", "blocks.2.norm")),
        ([nn.Module], ("",)),
    ],
)
def test_modules_by_class_and_name(modules: Any, names: tuple[str, ...]) -> None:
    model = ConvNet()
    want = gradients(model, MODELS["conv"][1])
    assert apply_selective_checkpointing(model, modules=modules).names == names
    assert equal(gradients(model, MODELS["conv"][1]), want)


class Nested(nn.Module):
    """Two stages of blocks of one class, and in each block a smaller repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList([self.block(), self.block()]) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))


def test_blocks_in_stages_are_found() -> None:
    names = apply_selective_checkpointing(Nested()).names
    assert names == ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        (None, "modules=None: Mlp has no repeated blocks; looked for .*GradientCheckpointingLayer.*ModuleList"),
        (["up", "middle"], "modules: 'middle' is neither a class nor a name of a module in Mlp"),
        ([nn.Conv2d], "modules: .*Conv2d.* is neither"),
    ],
)
def test_modules_that_are_not_there(modules: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        apply_selective_checkpointing(Mlp(), modules=modules)


def test_gradient_checkpointing_is_not_stacked() -> None:
    model = qwen3()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"enabled in 'model.*gradient_checkpointing_disable"):
        apply_selective_checkpointing(model)
    model.gradient_checkpointing_disable()
    apply_selective_checkpointing(model)
    with pytest.raises(ValueError, match=r"'model.layers.0' runs .*apply selective checkpointing first, and once"):
        apply_selective_checkpointing(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        MODELS["qwen3"][1](model)


def test_batch_norm_is_refused_before_it_runs() -> None:
    class Block(ConvBlock):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

    model = ConvNet(Block)
    with pytest.raises(ValueError, match=r"'norm' .BatchNorm2d. in Block .*'running_mean'"):
        apply_selective_checkpointing(model)
    apply_selective_checkpointing(model.eval())
    with pytest.raises(ValueError, match="'running_mean'"):
        model.train()(MAPS)
    assert model.blocks[0].norm.num_batches_tracked == 0


def test_a_forward_replaced_later_is_not_lost() -> None:
    model = ConvNet()
    handle = apply_selective_checkpointing(model)
    model.blocks[1].forward = abs
    with pytest.raises(RuntimeError, match=r"'blocks.1' has been replaced"):
        handle.remove()
    assert all("forward" in vars(block) for block in model.blocks)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# dynamo looks at the gradient of what is not a leaf wherever a graph breaks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("compiled_anew")
def test_in_compiled_models_checkpointed_blocks_run_eagerly() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    blocks = nn.Sequential(Mlp(), Mlp())
    x = torch.randn(N, D)
    want = gradients(blocks, lambda blocks: blocks(x).sin().sum())
    apply_selective_checkpointing(blocks)
    compiled = torch.compile(lambda blocks: blocks(x).sin().sum(), backend=backend)
    assert equal(gradients(blocks, compiled), want)
    assert any("sin" in code for code in graphs)
    assert not any("gelu" in code for code in graphs)
