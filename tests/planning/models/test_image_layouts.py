"""Image tokens and tensors, as many as the models and processors of transformers make."""

from types import SimpleNamespace

import pytest
from late_imports import LateModule
from vision_language_toys import CONFIGS, SIZES

model_options = LateModule("hf_memopt.planning.models.model_options")
model_batches = LateModule("hf_memopt.planning.models.model_batches")
transformers = LateModule("transformers")
SAMPLES, IMAGES = 2, 3


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_real_model_makes_a_vector_for_each_token(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    layout = model_batches.image_layout(config, model_options.parse_image_size(SIZES.get(model_type)))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    features = model.get_image_features(**layout.tensors(SAMPLES, IMAGES)).pooler_output
    num_vectors = sum(each.numel() // each.shape[-1] for each in features)
    assert num_vectors == SAMPLES * IMAGES * layout.num_tokens


SQUARE = {"height": 336, "width": 336}
PROCESSORS = {
    "qwen2_vl": ("Qwen2VLImageProcessor", {"min_pixels": 16, "max_pixels": 2**20}),
    "idefics3": ("Idefics3ImageProcessor", {"size": {"longest_edge": 728}}),
    "llava_next": ("LlavaNextImageProcessor", {"size": {"shortest_edge": 336}, "crop_size": SQUARE}),
    "internvl": ("GotOcr2ImageProcessor", {"crop_to_patches": True, "size": {"height": 448, "width": 448}}),
}
PUBLISHED = {
    "qwen2_vl": {},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "llava_next": {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}},
    "internvl": {},
}


@pytest.mark.parametrize("model_type", PROCESSORS)
@pytest.mark.parametrize("size", [(728, 546), (448, 896)])
def test_tensors_are_those_of_the_processor(model_type: str, size: tuple[int, int]) -> None:
    import numpy

    name, options = PROCESSORS[model_type]
    made = getattr(transformers, name)(**options)(numpy.zeros((*size, 3), dtype=numpy.uint8), return_tensors="pt")
    if model_type == "idefics3":
        size = (728, round(728 * size[1] / size[0])) if size[0] > size[1] else (round(728 * size[0] / size[1]), 728)
    if model_type == "internvl":  # the fitting one of its grids
        size = {(728, 546): (4 * 448, 3 * 448), (448, 896): (448, 896)}[size]
    config = transformers.AutoConfig.for_model(model_type, **PUBLISHED[model_type])
    tensors = model_batches.image_layout(config, size).tensors(1, 1)
    assert {each: tensors[each].shape for each in tensors} == {each: made[each].shape for each in tensors}
    if "image_grid_thw" in made:
        assert tensors["image_grid_thw"].equal(made["image_grid_thw"])


@pytest.mark.parametrize(
    ("model_type", "size", "message"),
    [
        ("qwen2_vl", None, "image_size=None: the patches that .* the choice of the processor of model_type='qwen2_vl'"),
        ("smolvlm", None, "image_size=None: the tiles of 32x32"),
        ("llava", (64, 32), "image_size=64x32: every image of model_type='llava' is made 32x32; leave it out"),
        ("git", None, "model_type='git' .* write setup and step yourself"),
    ],
)
def test_what_is_not_known_is_refused(model_type: str, size: tuple[int, int] | None, message: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS.get(model_type, {}))
    with pytest.raises(ValueError, match=message):
        model_batches.image_layout(config, size)


def test_images_of_many_sizes_are_refused() -> None:
    config = SimpleNamespace(model_type="llava", vision_config=SimpleNamespace(model_type="pixtral"))
    with pytest.raises(ValueError, match="images of a 'pixtral' vision tower have sizes of their own"):
        model_batches.image_layout(config, None)
