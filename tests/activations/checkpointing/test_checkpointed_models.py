"""Tests of selective checkpointing of whole models: the chosen blocks, and the unchanged rest of the model."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpointed_models import (
    MAPS,
    MODELS,
    TOKENS,
    ConvBlock,
    ConvNet,
    D,
    Mlp,
    N,
    Operations,
    build,
    equal,
    gradients,
    keep_everything,
)
from torch import Tensor, nn

from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.memory import SavedBytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(share=0.3)
def test_repeated_blocks_are_found(name: str) -> None:
    model, loss = build(name)
    plain = SavedBytes(model.parameters())
    gradients(model, loss, plain)
    handle = apply_selective_checkpointing(model, "all")
    vit = "vit.layers" if hasattr(model, "vit") and hasattr(model.vit, "layers") else "vit.encoder.layer"
    names = {"Qwen3ForCausalLM": "model.layers", "ViTForImageClassification": vit, "ConvNet": "blocks"}
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
    model, loss = build("qwen3")
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
    model = build("qwen3")[0]
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
    model = build("qwen3")[0].eval()
    want = model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    apply_selective_checkpointing(model)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0), want)


def test_a_cache_that_is_passed_by_position_is_left_out_too() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=96, n_positions=32, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()

    def loss(model: Any) -> Tensor:
        torch.manual_seed(1)  # for dropout
        return model(TOKENS, labels=TOKENS).loss

    want = gradients(model, loss)  # without a cache, whose keys have other strides and round differently
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
    """A model with two stages of blocks of one class, and a smaller repetition in each block."""

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
    model = build("qwen3")[0]
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


# Dynamo reads the gradients of tensors that are no leaves wherever a graph breaks.
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
