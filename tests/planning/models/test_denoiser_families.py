"""Batches for each class of denoisers, and adapters where diffusers' scripts put them."""

from pathlib import Path

import pytest
from denoiser_toys import CONFIGS, SMALL, write_denoiser
from transformers_toys import built, options_of

from hf_memopt.planning.models.denoiser_families import FAMILIES


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.sweep(share=0.15)
def test_a_real_denoiser_learns_from_the_batch(name: str, lora_rank: int | None, tmp_path: Path) -> None:
    settings = SMALL[name] | ({} if name == "dit" else {"image_size": "64x32"})
    options = options_of(write_denoiser(tmp_path, name), lora_rank=lora_rank, dtype="float32", **settings)
    model = built(options, "full", "cpu")
    loss = options.kind_of_task.loss(model, options.batch(options.config, 2))
    loss.backward()
    assert loss.isfinite()
    learning = {each: parameter for each, parameter in model.named_parameters() if parameter.requires_grad}
    # DiT's loss is of the noise alone, and the last layers of others give nothing to text.
    assert sum(parameter.grad is not None for parameter in learning.values()) > 0.8 * len(learning)
    if lora_rank is not None:
        targets = FAMILIES[options.config.class_name].lora_targets(options.config).split(",")
        adapted = {each.split(".lora_")[0] for each in learning}
        assert all(any(each.endswith(f".{target}") for target in targets) for each in adapted)
        assert all(any(each.endswith(f".{target}") for each in adapted) for target in targets)
