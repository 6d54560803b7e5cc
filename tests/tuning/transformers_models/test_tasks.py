"""What a model is trained for follows from its configuration, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from late_imports import LateModule
from transformers_toys import TOKENS, estimate

huggingface = LateModule("hf_memopt.tuning.huggingface")

FolderOf = Callable[..., str]


@pytest.mark.parametrize(
    ("model_type", "changes", "task"),
    [
        ("qwen3", {}, "causal"),
        ("bert", {}, "masked"),
        ("bert", {"architectures": ["BertLMHeadModel"]}, "causal"),
        ("t5", {}, "seq2seq"),
        ("vit", {}, "image-classification"),
    ],
)
def test_the_task_follows_from_the_configuration(
    model_type: str, changes: dict[str, Any], task: str, folder_of: FolderOf
) -> None:
    assert huggingface.HuggingFaceModel(folder_of(model_type, **changes), seq_len=TOKENS).kind == task


@pytest.mark.parametrize(
    ("model_type", "architecture", "remedy"),
    [
        ("clip", "CLIPModel", "task='image-classification' for CLIPForImageClassification"),
        ("whisper", "WhisperForConditionalGeneration", "task='causal' for WhisperForCausalLM"),
        ("bert", "BertForSequenceClassification", "task='masked' for BertForMaskedLM"),
    ],
)
def test_another_task_than_the_configurations_is_simulated_only_when_it_is_named(
    model_type: str, architecture: str, remedy: str, folder_of: FolderOf
) -> None:
    folder = folder_of(model_type, architectures=[architecture])
    with pytest.raises(ValueError, match=f"its configuration is of {architecture}, .*{remedy}"):
        _ = huggingface.HuggingFaceModel(folder, seq_len=TOKENS).kind
    task = remedy.split("'")[1]
    assert huggingface.HuggingFaceModel(folder, seq_len=TOKENS, task=task).name == f"{folder} as {remedy.split()[-1]}"


@pytest.mark.parametrize(
    "model_type", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "vit"))]
)
def test_every_task_can_be_simulated(model_type: str, folder_of: FolderOf) -> None:
    found = estimate(folder_of(model_type))
    assert found.confidence in ("high", "medium")
    assert found.unreached == ()


def test_architectures_without_a_task_are_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="no class of model_type='wav2vec2' for any task of seq2seq, masked, causal"):
        _ = huggingface.HuggingFaceModel(folder_of("wav2vec2"), task="auto", seq_len=8).kind
