"""Configurations that are refused before anything is built from them."""

import json
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

model_config = LateModule("hf_memopt.jobs.transformers_models.model_config")
transformers = LateModule("transformers")


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("text", ["{broken", "{}", '{"model_type": "unheard-of"}', "[1]"])
def test_unreadable_configurations_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="no configuration of a transformers model was found or read"):
        model_config.read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_size": 64.5}, "Field 'hidden_size' expected int, got float"),
        ({"hidden_size": None}, "Field 'hidden_size' expected int, got NoneType"),
        ({"hidden_size": -64}, "hidden_size=-64 must be at least 1"),
        ({"hidden_size": 2**62}, "hidden_size=4611686018427387904 must be at most 2147483647"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be at least 0"),
        (
            {"num_hidden_layers": 10**6, "layer_types": None},
            "num_hidden_layers=1000000 are more than 1000 layers, .*; use two smaller numbers and extrapolate",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights are not simulated; remove"),
    ],
)
def test_configurations_that_cannot_be_simulated_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = transformers.Qwen3Config(**SIZES).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=f"(?s)model='{tmp_path}'.*{message}"):
        model_config.read_config(str(tmp_path))


@pytest.mark.parametrize("model", ["nobody/no-such-model", "/nowhere"])
def test_unknown_models_are_refused(model: str) -> None:
    with pytest.raises(ValueError, match=f"model='{model}'.*when offline, one that was downloaded before"):
        model_config.read_config(model)
