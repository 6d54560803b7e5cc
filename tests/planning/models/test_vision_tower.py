"""A vision tower that is frozen keeps nothing for backward, and has no adapters."""

import pytest
from transformers_toys import FolderOf, built, options_of
from vision_language_toys import CONFIGS, SIZES


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.sweep(share=0.15)
def test_nothing_of_it_is_trained(model_type: str, lora_rank: int | None, folder_of: FolderOf) -> None:
    def trained(freeze: bool) -> set[str]:
        options = options_of(
            folder_of(model_type), image_size=SIZES.get(model_type), lora_rank=lora_rank, freeze_vision_tower=freeze
        )
        model = built(options)
        tower = model.get_encoder(modality="image")
        name = next(name for name, module in model.named_modules() if module is tower)
        learning = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
        inside = {each for each in learning if each.startswith(f"{name}.")}
        assert bool(inside) != freeze
        return learning - inside

    assert trained(True) == trained(False) != set()
