"""Tasks that follow from a model's configuration, or are refused."""

import shlex
from typing import Any

import pytest
import torch
from late_imports import LateModule
from transformers_toys import SIZES, TOKENS, FolderOf, estimate, options_of, workload_of

from hf_memopt.planning.models.model_batches import Sample

tasks = LateModule("hf_memopt.planning.models.tasks")
transformers = LateModule("transformers")


@pytest.mark.parametrize(
    ("model_type", "changes", "task"),
    [
        ("qwen3", {}, "causal"),
        ("bert", {}, "masked"),
        ("bert", {"architectures": ["BertLMHeadModel"]}, "causal"),
        ("t5", {}, "seq2seq"),
        ("vit", {}, "image-classification"),
        ("bart", {}, "seq2seq"),
        ("whisper", {"architectures": ["WhisperForConditionalGeneration"]}, "speech-seq2seq"),
        ("wav2vec2", {}, "ctc"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "sequence-classification"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "token-classification"),
        ("llava", {}, "image-text-to-text"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "image-text-to-text"),
    ],
)
def test_the_task_follows_from_the_configuration(
    model_type: str, changes: dict[str, Any], task: str, folder_of: FolderOf
) -> None:
    assert options_of(folder_of(model_type, **changes), seq_len=TOKENS).kind == task


@pytest.mark.parametrize(
    ("model_type", "architecture", "remedy"),
    [
        ("clip", "CLIPModel", "task='image-classification' for CLIPForImageClassification"),
        ("wav2vec2", "Wav2Vec2ForPreTraining", "task='ctc' for Wav2Vec2ForCTC"),
        ("bert", "BertForNextSentencePrediction", "task='masked' for BertForMaskedLM"),
    ],
)
def test_another_task_than_the_configurations_is_simulated_only_when_it_is_named(
    model_type: str, architecture: str, remedy: str, folder_of: FolderOf
) -> None:
    folder = folder_of(model_type, architectures=[architecture])
    with pytest.raises(ValueError, match=f"its configuration is of {architecture}, .*{remedy}"):
        _ = options_of(folder, seq_len=TOKENS).kind
    task = remedy.split("'")[1]
    model = workload_of(folder, seq_len=TOKENS, task=task, batch_size=2)
    assert model.name.startswith(f"Trainer of {folder} as {remedy.split()[-1]} in float32")


CASES = [
    ("bert", "masked"),
    ("bert", "token-classification"),
    ("qwen3", "sequence-classification"),
    ("t5", "seq2seq"),
    ("bart", "seq2seq"),
    ("whisper", "speech-seq2seq"),
    ("wav2vec2", "ctc"),
    ("vit", "image-classification"),
]
QUICK = ("wav2vec2",)
FRAMES = 16


@pytest.mark.parametrize(
    ("model_type", "task"),
    [pytest.param(*case, marks=[] if case[0] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_every_task_can_be_simulated(model_type: str, task: str, folder_of: FolderOf) -> None:
    found = estimate(folder_of(model_type), task=task)
    assert found.confidence in ("high", "medium")
    assert found.unreached == ()


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_a_real_model_learns_from_the_batch(model_type: str, name: str, folder_of: FolderOf) -> None:
    config, task = transformers.AutoConfig.from_pretrained(folder_of(model_type)), tasks.TASKS[name]
    config.pad_token_id = 0
    model = task.build(config, model_type)
    output = model(**task.batch(config, 2, Sample(FRAMES)))
    output.loss.backward()
    assert output.loss.isfinite()
    if name == "ctc":
        assert output.logits.shape[:2] == (2, FRAMES)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.sweep(share=0.5)
def test_beside_adapters_the_head_of_a_classifier_is_trained(folder_of: FolderOf, quantize: str) -> None:
    options = {"lora_rank": 2, "lora_targets": "q_proj", "quantize": quantize, "num_labels": 2}
    folder = folder_of("qwen3", num_labels=options.pop("num_labels"))
    causal, classifier = (
        estimate(folder, task=task, **options).breakdown["parameters"] for task in ("causal", "sequence-classification")
    )
    assert classifier - causal == 2 * SIZES["hidden_size"] * 4


@pytest.mark.parametrize(
    ("model_type", "name", "message"),
    [
        ("speech_to_text", "speech-seq2seq", "model_type='speech_to_text' does not say .* as whisper does"),
        ("wav2vec2-bert", "ctc", "model_type='wav2vec2-bert' has no conv_kernel and conv_stride"),
    ],
)
def test_inputs_that_a_configuration_does_not_tell_are_refused(model_type: str, name: str, message: str) -> None:
    config, task = transformers.AutoConfig.for_model(model_type), tasks.TASKS[name]
    assert task.class_name(config) is not None
    with pytest.raises(ValueError, match=f"task='{name}': {message}.*; write setup and step yourself"):
        task.batch(config, 2, Sample(8))


def test_architectures_without_a_task_are_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="no class of model_type='sam' for any task of seq2seq, speech-seq2seq"):
        _ = options_of(folder_of("sam"), task="auto", seq_len=8).kind


def test_a_class_for_text_alone_gets_the_part_for_text() -> None:
    config = transformers.Llama4Config(text_config=transformers.Llama4TextConfig(num_hidden_layers=1).to_dict())
    with torch.device("meta"):
        model = tasks.TASKS["causal"].build(config, "it")
    assert type(model.config) is transformers.Llama4TextConfig
    assert len(model.model.layers) == 1


@pytest.mark.parametrize("name", ["DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"])
def test_of_several_classes_the_configurations_is_built(name: str) -> None:
    config = transformers.DeiTConfig(num_hidden_layers=1, architectures=[name])
    with torch.device("meta"):
        model = tasks.TASKS["image-classification"].build(config, "it")
    assert (type(model).__name__, tasks.TASKS["image-classification"].class_name(config)) == (name, name)


def test_a_wrong_task_says_which_there_are(qwen3: str) -> None:
    with pytest.raises(ValueError, match=r"for task='seq2seq'; it has some for causal, sequence-class.*, token-class"):
        options_of(qwen3, task="seq2seq")


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="the model makes no loss from labels alone; write setup and step yourself"):
        tasks.TASKS["image-classification"].loss(lambda **inputs: object(), {})


def test_flags_for_scripts_carry_reentrant_checkpoints_and_reductions_in_each_pass(
    folder_of: FolderOf,
) -> None:
    shared = {"effective_batch": 8, "batch_size": 2, "engine": "fsdp2", "optimizer_on": "host"}
    run = workload_of(folder_of("bert"), seq_len=TOKENS, checkpointing="reentrant", **shared).given
    _, *flags = shlex.split(run.options.kind_of_task.script(run.as_mapping(), run.options.config))
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (arguments,) = parser.parse_args_into_dataclasses(flags)
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert arguments.gradient_accumulation_steps == 4
