"""Checkpoints that `train_sft.py` loads in another form than they were published in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

base_model = LateModule("hf_memopt.recipes.sft.base_model")
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
