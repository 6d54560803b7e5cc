"""Configurations that are refused before anything is built from them."""

import json
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from transformers_toys import FolderOf, estimate, step_of

from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

accelerate_config = LateModule("hf_memopt.planning.models.accelerate_config")
model_config = LateModule("hf_memopt.planning.models.model_config")
transformers = LateModule("transformers")


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "line 1: not JSON"),
        ('{"hidden_size": 4,\n "vocab_size": 8,\n}', "line 3: not JSON \\(a comma before the closing bracket\\)"),
        ("[1]", "holds a list, and no object"),
        ("{}", "has no model_type"),
        ('{"model_type": "unheard-of"}', "has no model_type='unheard-of'; correct it, or update transformers"),
        (
            '{"model_type": "unheard-of", "auto_map": {"AutoConfig": "own.Config"}}',
            "code lies in its repository \\(auto_map\\) and is not run; write setup and step yourself",
        ),
        ('{"type": "act", "chunk_size": 50}', "is a LeRobot policy of type 'act'"),
    ],
)
def test_unreadable_configurations_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"model='{tmp_path}.*{message}") as caught:
        model_config.read_config(str(tmp_path))
    assert not any(words in str(caught.value) for words in ("http", "trust_remote_code", "\n"))


def test_folders_without_a_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model='{tmp_path}': there is no config.json in this folder"):
        model_config.read_config(str(tmp_path))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "of/somebody", "r": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(
        ValueError, match="adapter of PEFT; give the model that it is for, of/somebody, with lora_rank=16"
    ):
        model_config.read_config(str(tmp_path))


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(ValueError, match=r"weights.gguf': it is no text in UTF-8; name a config.json"):
        model_config.read_config(str(tmp_path / "weights.gguf"))


def test_a_misspelt_folder_is_told_from_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "Mistral-7B-v0.1").mkdir()
    with pytest.raises(ValueError, match=f"there is no folder model=.*; there is {tmp_path}/Mistral-7B-v0.1$"):
        model_config.read_config(str(tmp_path / "Mistral-7B-v01"))
    with pytest.raises(ValueError, match=f"there is no folder model=.* in {tmp_path}; name a folder"):
        model_config.read_config(str(tmp_path / "llama"))


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
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quant_method='gptq': training adapters on GPTQ is",
        ),
    ],
)
def test_configurations_that_cannot_be_simulated_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = transformers.Qwen3Config(**SIZES).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=f"(?s)model='{tmp_path}'.*{message}"):
        model_config.read_config(str(tmp_path))


@pytest.mark.parametrize("model", ["nobody/no-such-model", "no-such-model"])
def test_unknown_models_are_refused(model: str) -> None:
    with pytest.raises(ValueError, match=f"model='{model}'.*when offline, one that was downloaded before"):
        model_config.read_config(model)


def unsaid(folder: Path, **fields: Any) -> tuple[str, ...]:
    (folder / "config.json").write_text(json.dumps(fields))
    found: tuple[str, ...] = model_config.unsaid_sizes(str(folder), model_config.read_config(str(folder)))
    return found


def test_sizes_that_a_configuration_leaves_out_are_named(tmp_path: Path) -> None:
    assert unsaid(tmp_path, model_type="llama", vocab_size=99, intermediate_size=8, num_attention_heads=4) == (
        "the configuration does not say hidden_size and num_hidden_layers; LlamaConfig's defaults, 4096 and 32, were "
        "taken",
    )


def test_a_size_by_another_name_is_said(tmp_path: Path) -> None:
    names = {"vocab_size": 99, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert unsaid(tmp_path, model_type="gpt2", **names) == ()
    del names["hidden_size"]
    assert unsaid(tmp_path, model_type="gpt2", **names) == (
        "the configuration does not say n_embd; GPT2Config's default, 768, was taken",
    )


def test_a_part_that_leaves_sizes_out_is_named(tmp_path: Path) -> None:
    part = {"model_type": "llama", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
    (said,) = unsaid(tmp_path, model_type="llava", text_config=part, vision_config=SIZES | {"vocab_size": 9})
    assert said.startswith("the configuration's text_config does not say intermediate_size and num_attention_heads;")


@pytest.mark.parametrize("model_type", ["qwen3", "bert", "t5", "vit", "bart", "wav2vec2", "whisper"])
def test_a_saved_configuration_says_all_sizes(model_type: str, folder_of: FolderOf) -> None:
    folder = folder_of(model_type)
    assert model_config.unsaid_sizes(folder, model_config.read_config(folder)) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "deberta-v2", "type_vocab_size": 0},
        {"model_type": "xlnet"},
        {"model_type": "phi4_multimodal"},
    ],
)
def test_sizes_that_may_be_zero_or_none_are_taken(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert model_config.read_config(str(tmp_path)).model_type == fields["model_type"]


def test_an_error_of_the_models_own_code_is_one_line(folder_of: FolderOf) -> None:
    folder = folder_of("t5", decoder_start_token_id=None)
    with pytest.raises(ValueError, match=rf"model='{folder}'.*modeling_t5.py, line \d+, raises") as caught:
        estimate(folder)
    assert "\n" not in str(caught.value)


def test_assumptions_on_sizes_cost_confidence(folder_of: FolderOf) -> None:
    folder = Path(folder_of("qwen3"))
    fields = json.loads((folder / "config.json").read_text())
    del fields["num_hidden_layers"], fields["layer_types"], fields["max_window_layers"]
    (folder / "config.json").write_text(json.dumps(fields))
    step = step_of(str(folder), seq_len=8, batch_size=1)
    found = run_isolated(lambda: simulate_step(step))
    assert found.confidence == "medium"
    assert found.assumptions[0].startswith("the configuration does not say num_hidden_layers;")


def test_errors_of_an_engine_are_one_line() -> None:
    sharing = accelerate_config.Sharing("fsdp2", 1, "host")
    refused = "engine='fsdp2' with optimizer_on='host' cannot prepare this model \\(AssertionError: not on cuda\\); use"
    with pytest.raises(ValueError, match=refused), model_config.preparing("model='m'", sharing):
        raise AssertionError("not\non virtualcuda")
    with pytest.raises(RuntimeError, match="numel: integer multiplication overflow"):
        with model_config.preparing("model='m'", sharing):
            raise RuntimeError("numel: integer multiplication overflow")
    with pytest.raises(TypeError), model_config.preparing("model='m'", accelerate_config.Sharing()):
        raise TypeError
