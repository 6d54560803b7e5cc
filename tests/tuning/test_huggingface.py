"""transformers models as workloads: found, built from their configurations, and simulated with every lever."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from late_imports import LateModule

from hf_memopt.estimate import MemoryEstimate, estimate_peak_memory
from hf_memopt.estimate.estimate import simulate_step
from hf_memopt.estimate.gpus import find_card
from hf_memopt.estimate.simulation.child_process import run_isolated

causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
huggingface = LateModule("hf_memopt.tuning.huggingface")
transformers = LateModule("transformers")


VOCABULARY, TOKENS, BATCH = 512, 64, 2
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16},
    "bert": {**SIZES, "vocab_size": VOCABULARY},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    | {"decoder_start_token_id": 0},
    "vit": {**SIZES, "image_size": 32, "patch_size": 8},
    "wav2vec2": {},
    "clip": {},
    "whisper": {},
}
CARD = find_card("rtx4070")
FolderOf = Callable[..., str]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Writes a configuration, with changes."""

    def write(model_type: str, **changes: Any) -> str:
        folder = tmp_path_factory.mktemp(model_type)
        transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes}).save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture(scope="module")
def qwen3(folder_of: FolderOf) -> str:
    return folder_of("qwen3")


def estimate(
    model: str, checkpointing: str = "none", offload: str = "off", num_micro_batches: int = 1, **options: Any
) -> MemoryEstimate:
    settings = {"seq_len": TOKENS, "effective_batch": BATCH * num_micro_batches, "offload_threshold_mb": 0.001}
    workload = huggingface.HuggingFaceModel(model, **{**settings, **options})
    step = workload.step_with(checkpointing, offload, BATCH)
    return estimate_peak_memory(step.setup, step.step, num_steps=step.num_steps, gpu=CARD)


@pytest.fixture(scope="module")
def plain(qwen3: str) -> MemoryEstimate:
    return estimate(qwen3, precision="bf16")


# --------------------------------------------------------------------------------------------------- the task


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


def test_a_config_file_will_do(qwen3: str) -> None:
    assert huggingface.HuggingFaceModel(f"{qwen3}/config.json", seq_len=TOKENS).kind == "causal"


# ------------------------------------------------------------------------------------------------ the levers


def test_checkpointing_trades_activations(qwen3: str, plain: MemoryEstimate) -> None:
    selective, full = (estimate(qwen3, checkpointing, precision="bf16") for checkpointing in ("selective", "full"))
    assert full.phases["forward"] < selective.phases["forward"] < plain.phases["forward"]
    assert full.step_ms is not None
    assert plain.step_ms is not None
    assert full.step_ms > plain.step_ms


def test_offloading_moves_activations_to_the_host(qwen3: str, plain: MemoryEstimate) -> None:
    offloaded = estimate(qwen3, offload="all", precision="bf16")
    inputs = estimate(qwen3, "full", "inputs", precision="bf16")
    assert offloaded.host_bytes > inputs.host_bytes > plain.host_bytes
    assert offloaded.peak_bytes < plain.peak_bytes
    assert offloaded.stall_ms is not None


@pytest.mark.slow
def test_offloading_plans_for_a_card(qwen3: str) -> None:
    workload = huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS, effective_batch=BATCH)
    assert workload.step_with("none", "auto", BATCH).num_steps == 4
    assert estimate(qwen3, offload="auto", precision="bf16").confidence == "medium"


def test_adapters_are_all_that_is_trained(qwen3: str) -> None:
    rank, hidden, inner, heads = 4, 64, 128, 16 * 2
    found = estimate(qwen3, lora_rank=rank)
    # Each adapted layer has rank * (inputs + outputs) weights: q, k, v, o, gate, up, down.
    pairs = [(hidden, hidden), (hidden, heads), (hidden, heads), (hidden, hidden), *[(hidden, inner)] * 3]
    assert found.breakdown["parameters"] == 2 * 4 * rank * sum(map(sum, pairs))
    assert found.breakdown["frozen parameters"] > 10 * found.breakdown["parameters"]


@pytest.mark.slow
def test_optimizers_differ_in_their_state(qwen3: str, plain: MemoryEstimate) -> None:
    weights = plain.breakdown["parameters"]
    assert 2 * weights < plain.breakdown["optimizer state"] < 2.2 * weights
    assert "optimizer state" not in estimate(qwen3, optimizer="sgd").breakdown
    assert estimate(qwen3, optimizer="adafactor").breakdown["optimizer state"] < weights / 4
    foreach = estimate(qwen3, optimizer="adamw-foreach")
    assert foreach.phases["optimizer"] > 5 * weights > plain.phases["optimizer"]


@pytest.mark.slow
def test_accumulation_is_simulated_with_two_micro_batches(qwen3: str, plain: MemoryEstimate) -> None:
    workload = huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS, effective_batch=8)
    assert workload.simulated({"activations": "kept"}, micro_batch=1).num_micro_batches == 2
    accumulated = estimate(qwen3, num_micro_batches=2, precision="bf16")
    assert accumulated.phases["forward"] == plain.phases["forward"] + plain.breakdown["parameters"]


@pytest.mark.slow
def test_fp16_has_the_sizes_of_bf16_and_bfloat16_weights_half_of_float32(qwen3: str, plain: MemoryEstimate) -> None:
    assert estimate(qwen3, precision="fp16").peak_bytes == plain.peak_bytes
    halves = estimate(qwen3, dtype="bfloat16").breakdown["parameters"]
    # Not exactly: the weights of normalisation are rounded up to 512 bytes.
    assert halves == pytest.approx(plain.breakdown["parameters"] / 2, rel=0.02)


@pytest.mark.slow
def test_eager_attention_keeps_the_scores(qwen3: str) -> None:
    sdpa, eager = (estimate(qwen3, attention=attention) for attention in ("sdpa", "eager"))
    scores = 2 * BATCH * 4 * TOKENS * TOKENS * 4
    # Less what the fused kernel keeps instead, one number per query and head.
    assert eager.phases["forward"] - sdpa.phases["forward"] == pytest.approx(scores, rel=0.05)


# ------------------------------------------------------------------------------------------- files and errors


def test_the_recipe_reads_what_is_written(qwen3: str, tmp_path: Path) -> None:
    workload = huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS, effective_batch=8, precision="bf16")
    settings = {"activations": "checkpointed, inputs offloaded"}
    accelerate, chosen, flags = workload.write(settings, 2, tmp_path)
    assert load_config_from_file(str(accelerate)).mixed_precision == "bf16"
    assert yaml.safe_load(accelerate.read_text())["num_processes"] == 1
    assert json.loads(chosen.read_text())["gradient_accumulation_steps"] == 4
    options = causal_lm_options.parse("", ["--config_path", str(flags), f"--output_dir={tmp_path / 'run'}"])
    assert (options.model.model, options.model.gradient_checkpointing) == (qwen3, True)
    assert (options.training.per_device_batch_size, options.training.gradient_accumulation_steps) == (2, 4)
    assert (options.offload.offload, options.data.block_size) == ("inputs", TOKENS)


def test_gpus_share_a_model_and_its_batch(qwen3: str, plain: MemoryEstimate, tmp_path: Path) -> None:
    shared = {"seq_len": TOKENS, "effective_batch": 8, "num_gpus": 2}
    workload = huggingface.HuggingFaceModel(qwen3, **shared, engine="fsdp2")
    assert workload.name == f"{qwen3} as Qwen3ForCausalLM, on each of 2 GPUs with fsdp2"
    assert workload.micro_batches == [1, 2, 4]
    assert {huggingface.ACTIVATIONS[name][1] for name in workload.levers[0].values} == {"off"}
    estimate = run_isolated(lambda: simulate_step(workload.step_with("none", "off", BATCH), gpu=CARD))
    for kind in ("parameters", "optimizer state"):
        assert plain.breakdown[kind] / 2 <= estimate.breakdown[kind] < 0.6 * plain.breakdown[kind]
    assert estimate.breakdown["gathered weights"] > 0
    assert "communication buffers" in estimate.storage_kinds
    written = workload.write({"activations": "kept"}, BATCH, tmp_path)
    assert [path.name for path in written] == ["accelerate.yaml", "settings.json"]
    assert load_config_from_file(str(written[0])).num_processes == 2
    assert json.loads(written[1].read_text())["gradient_accumulation_steps"] == 2
    with_copies = huggingface.HuggingFaceModel(qwen3, **shared).write({"activations": "kept"}, BATCH, tmp_path)
    assert yaml.safe_load(with_copies[2].read_text())["training"]["gradient_accumulation_steps"] == 2


def test_no_flags_are_written_for_what_the_recipe_cannot_do(qwen3: str, tmp_path: Path) -> None:
    workload = huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS, lora_rank=4)
    names = [path.name for path in workload.write({"activations": "kept"}, 1, tmp_path)]
    assert names == ["accelerate.yaml", "settings.json"]
    assert all(checkpointing in ("none", "selective", "full") for checkpointing, _ in huggingface.ACTIVATIONS.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is unknown; choose from no, bf16, fp16"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown"),
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"seq_len": 10**6}, "longer than the model's max_position_embeddings"),
        ({"task": "masked"}, "no class of model_type='qwen3' for task='masked'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str, qwen3: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = huggingface.HuggingFaceModel(qwen3, **{"seq_len": TOKENS, **options}).kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("most", "off", 1), "checkpointing='most' is unknown"),
        (("none", "disk", 1), "offload='disk' is unknown"),
        (("none", "inputs", 1), "use checkpointing='full'"),
        (("none", "off", 3), "micro_batch=3 must be a divisor of effective_batch=8"),
    ],
)
def test_steps_are_checked(arguments: tuple[str, str, int], message: str, qwen3: str) -> None:
    with pytest.raises(ValueError, match=message):
        huggingface.HuggingFaceModel(qwen3, seq_len=TOKENS).step_with(*arguments)


@pytest.mark.parametrize(
    ("change", "seq_len", "message"),
    [
        (
            {"hidden_act": "nope"},
            TOKENS,
            r"transformers cannot build a model from this configuration \(KeyError: 'nope'\)",
        ),
        ({"max_position_embeddings": 2**62}, 2**31 - 1, "a tensor of this step is larger than any memory"),
    ],
)
def test_what_shows_when_a_model_is_built_or_run(
    change: dict[str, Any], seq_len: int, message: str, qwen3: str, tmp_path: Path
) -> None:
    config = json.loads((Path(qwen3) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change | {"vocab_size": 2**31 - 1}))
    workload = huggingface.HuggingFaceModel(str(tmp_path), seq_len=seq_len, effective_batch=8)

    def simulated() -> None:
        step = workload.step_with("none", "off", 8)
        estimate_peak_memory(step.setup, step.step)

    with pytest.raises(ValueError, match=message):
        simulated()


def test_architectures_without_a_task_are_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="no class of model_type='wav2vec2' for any task of seq2seq, masked, causal"):
        _ = huggingface.HuggingFaceModel(folder_of("wav2vec2"), task="auto", seq_len=8).kind


def test_fp16_and_bf16_take_different_kernels_on_turing(folder_of: FolderOf) -> None:
    ungrouped = folder_of("qwen3", num_attention_heads=4, num_key_value_heads=4)

    def saved_bytes(precision: str, card: str) -> int:
        workload = huggingface.HuggingFaceModel(ungrouped, seq_len=TOKENS, effective_batch=BATCH, precision=precision)
        step = workload.step_with("none", "off", BATCH)
        return estimate_peak_memory(step.setup, step.step, gpu=card).phases["forward"]

    assert saved_bytes("fp16", "t4") < saved_bytes("bf16", "t4")
    assert saved_bytes("fp16", "rtx4070") == saved_bytes("bf16", "rtx4070")
