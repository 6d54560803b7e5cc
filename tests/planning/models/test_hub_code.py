"""Tests that no estimate runs code of the hub: kernels that a configuration or a model's class names, and its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memopt.cli import main
from hf_memopt.planning.simulation.patched_transformers import no_hub_kernels

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
MAMBA |= {"vocab_size": 128, "state_size": 4}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "kernel": (LLAMA | {"attn_implementation": "kernels-community/flash-attn"}, "attn_implementation='kernels-"),
    "older name": (LLAMA | {"_attn_implementation": "somebody/evil@main:fn"}, "is code of the hub, which is not run"),
    "experts": (LLAMA | {"experts_implementation": "somebody/evil"}, "experts_implementation='somebody/evil' is code"),
    "paged": (LLAMA | {"attn_implementation": "paged|somebody/evil"}, "is code of the hub"),
    "by part": (LLAMA | {"attn_implementation": {"": "somebody/evil"}}, "is code of the hub"),
    "in a part": (
        {"model_type": "llava", "attn_implementation": {"text_config": "a/b"}, "text_config": LLAMA},
        "text_config: attn_implementation='a/b' is code of the hub",
    ),
    "no method": (LLAMA | {"quantization_config": "evil"}, "must be an object"),
    "method": (LLAMA | {"quantization_config": {"quant_method": "somebody/evil"}}, "is not simulated"),
    "model type": ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}, r"(auto_map) and is not run"),
}


@pytest.fixture(params=[True, False], ids=["kernels", "no kernels"])
def loaded(request: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of kernels that are loaded, with the package `kernels` and without it."""
    from transformers.integrations import hub_kernels

    names: list[str] = []
    if request.param:
        monkeypatch.setattr(hub_kernels, "_kernels_available", True)
        monkeypatch.setattr(hub_kernels.importlib.metadata, "version", lambda name: "0.12.0")
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", lambda name, **options: names.append(name), raising=False)
    return names


@pytest.fixture
def estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any]], tuple[int, str]]:
    def run(values: dict[str, Any]) -> tuple[int, str]:
        (tmp_path / "config.json").write_text(json.dumps(values))
        status = main(["estimate", str(tmp_path), "--gpu", "rtx4090", "--seq-len", "16"])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_that_names_code_is_refused(case: str, estimate: Any, loaded: list[str]) -> None:
    values, said = CASES[case]
    status, printed = estimate(values)
    assert (status, loaded, printed.count("\n")) == (2, [], 1)
    assert said in printed


def test_code_beside_a_known_model_is_ignored_with_a_word(estimate: Any, loaded: list[str]) -> None:
    status, printed = estimate(
        LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "attn_implementation": "sdpa"}
    )
    assert (status, loaded) == (0, [])
    assert "code of its own (auto_map) is not run; transformers' LlamaConfig was taken" in " ".join(printed.split())


def test_kernels_that_a_class_names_are_done_without(loaded: list[str]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import hub_kernels

    config = AutoConfig.for_model(**MAMBA)
    with no_hub_kernels():
        model = AutoModelForCausalLM.from_config(config)
        model(torch.zeros(1, 3, dtype=torch.long))
    assert loaded == []
    if hub_kernels._kernels_available:
        hub_kernels.get_kernel("kernels-community/mamba-ssm")
        assert loaded == ["kernels-community/mamba-ssm"]
