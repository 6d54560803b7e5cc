"""Checkpoints that `train_sft.py` loads in another form than they were published in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

base_model = LateModule("hf_memopt.recipes.sft.base_model")
sft_options = LateModule("hf_memopt.recipes.sft.options")
causal_lm_model = LateModule("hf_memopt.recipes.causal_lm.model")
causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
transformers = LateModule("transformers")


@pytest.mark.parametrize(("published", "expected"), [({"quant_method": "mxfp4"}, True), (None, None)])
def test_weights_in_mxfp4_are_dequantised(published: Any, expected: bool | None, tmp_path: Path) -> None:
    config = transformers.GptOssConfig(num_hidden_layers=1)
    if published:
        config.quantization_config = published
    config.save_pretrained(tmp_path)
    found = base_model.dequantization(str(tmp_path))
    assert (None if found is None else found.dequantize) == expected


def test_4_bits_are_packed_in_the_dtype_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = base_model._quantization("nf4", torch.bfloat16)
    assert found.bnb_4bit_quant_storage == torch.bfloat16


def test_recipes_refuse_kernels_of_the_hub(tmp_path: Path) -> None:
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "attn_implementation": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **tiny}))
    for load in (
        lambda: base_model.load_model(sft_options.SftOptions(model=str(tmp_path))),
        lambda: causal_lm_model.make_model(causal_lm_options.ModelOptions(model=str(tmp_path)), None, 8),
    ):
        with pytest.raises(ValueError, match=r"cannot be loaded.*: attn_implementation='a/b' is code of the hub"):
            load()
