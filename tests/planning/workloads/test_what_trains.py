"""Parts of a model that train, or do not, where a flag says so."""

import pytest
from late_imports import LateModule
from transformers_toys import FolderOf, estimate, options_of, workload_of

file_trainer = LateModule("hf_memopt.planning.workloads.file_trainer")
torch = LateModule("torch")

LAYER, EMBEDDING = 64 * (64 + 64) + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16, 512 * 64


def num_trained(model: str, **flags: object) -> int:
    trainer = workload_of(model, seq_len=32, **flags).given.make_trainer(options_of(model, seq_len=32).config)
    return sum(each.numel() for each in trainer.model.parameters() if each.requires_grad)


def test_first_layers_and_embeddings_do_not_train(qwen3: str) -> None:
    assert num_trained(qwen3) - num_trained(qwen3, freeze_layers=1) == LAYER + EMBEDDING


def test_frozen_layers_have_neither_gradients_nor_state(qwen3: str) -> None:
    whole, part = estimate(qwen3), estimate(qwen3, freeze_layers=1)
    frozen = 4 * (LAYER + EMBEDDING)
    assert part.peak_bytes < whole.peak_bytes - 2 * frozen


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"freeze_layers": 2}, "freeze_layers=2: the model has 2 layers; freeze fewer"),
        ({"freeze_layers": 1, "lora_rank": 2}, "freeze_layers=1: adapters freeze all layers; leave one out"),
    ],
)
def test_layers_that_cannot_be_frozen(flags: dict[str, int], message: str, qwen3: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_trained(qwen3, **flags)


@pytest.mark.parametrize("trainer", ["sft", "trainer"])
def test_embeddings_train_next_to_adapters(trainer: str, qwen3: str) -> None:
    flags = {"lora_rank": 2, "trainer": trainer}
    more = num_trained(qwen3, modules_to_save="embed_tokens", **flags) - num_trained(qwen3, **flags)
    assert more == EMBEDDING


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trainer", ["sft", "trainer"])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_adapters_have_the_dtype_that_is_asked_for(dtype: str, trainer: str, quantize: str, qwen3: str) -> None:
    flags = {"lora_rank": 2, "trainer": trainer, "quantize": quantize, "adapters_dtype": dtype, "seq_len": 32}
    made = workload_of(qwen3, **flags).given
    trainer_made = made.make_trainer(made.options.config)
    dtypes = {each.dtype for each in trainer_made.model.parameters() if each.requires_grad}
    assert dtypes == {getattr(torch, dtype)}


def test_the_recipe_gets_the_dtype_of_adapters(folder_of: FolderOf) -> None:
    fields = LateModule("hf_memopt.planning.workloads.trainer_fields")
    run = workload_of(folder_of("qwen3"), seq_len=32, lora_rank=2, adapters_dtype="bfloat16").given
    assert fields.of_recipe(run.options, {})["adapters_dtype"] == "bfloat16"
