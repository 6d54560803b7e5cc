"""Checkpoints that `train_sft.py` loads in another form than they were published in, and what no script loads."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule

base_model = LateModule("hf_memopt.recipes.sft.model")
sft_options = LateModule("hf_memopt.recipes.sft.options")
causal_lm_model = LateModule("hf_memopt.recipes.causal_lm.step")
causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
embeddings = LateModule("hf_memopt.integrations.sentence_transformers.train")
train_orpo = LateModule("hf_memopt.integrations.train_orpo")
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
    words = ["--quantize", "nf4", "--lora_rank", "4", "--dtype", "bfloat16"]
    found = base_model._quantization(sft_options.parse("", words))
    assert found.bnb_4bit_quant_storage == torch.bfloat16


LOADERS: dict[str, Callable[[str], Any]] = {
    "train_sft": lambda name: base_model.load_model(sft_options.parse("", ["--model", name])),
    "train_causal_lm": lambda name: causal_lm_model.make_model(causal_lm_options.ModelOptions(model=name), None, 8),
    "sentence_transformers": lambda name: embeddings.main(embeddings.EmbeddingArguments(model=name), None),
    "train_orpo": lambda name: train_orpo.main(
        None, None, SimpleNamespace(model_name_or_path=name, model_revision="main")
    ),
}


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("is_adapter", [False, True], ids=["model", "adapter"])
@pytest.mark.parametrize("script", LOADERS)
def test_recipes_refuse_kernels_of_the_hub(script: str, is_adapter: bool, tmp_path: Path) -> None:
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "attn_implementation": "a/b"}
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    for each, more in ((folder, {}), (adapter, {"attn_implementation": "sdpa"})):
        each.mkdir()
        (each / "config.json").write_text(json.dumps({"model_type": "llama", **tiny, **more}))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with pytest.raises(ValueError, match=r"attn_implementation='a/b' is code of the hub"):
        LOADERS[script](str(adapter if is_adapter else folder))
