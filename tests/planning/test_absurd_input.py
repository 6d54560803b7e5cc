"""Files with absurd fields: each trains in the simulation, or is refused in a line and in bounded time."""

import copy
import json
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from transformers_toys import step_of

from hf_memopt.cli import main
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.job import FIELDS, Job, read_spec
from hf_memopt.planning.simulation.child_process import run_isolated

policy_toys = LateModule("policy_toys")
transformers = LateModule("transformers")
workloads = LateModule("hf_memopt.planning.workloads.of_job")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SIZES | {"vocab_size": 100, "max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", TEXT),
    "BertForMaskedLM": ("BertConfig", TEXT),
    "MixtralForCausalLM": ("MixtralConfig", TEXT | {"num_local_experts": 2}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}),
    "ViTForImageClassification": ("ViTConfig", SIZES | {"image_size": 32, "patch_size": 16}),
}
VALUES: list[Any] = [
    *(0, -1, 1, 3, 7, 2**31, 2**40, 10**9, 0.5, 1e300, float("nan"), float("inf"), None, True, False),
    *("", "x", "\x1b[2J", "é" * 50, "x" * 100_000, "float16", "torch.float99"),
    *([], [1], ["a"], [[]], [0] * 5000, {}, {"a": 1}, {"rope_type": "yarn"}, {"0": {"1": {}}}),
]
OF_CONFIGS = (
    *("quantization_config", "num_labels", "id2label", "architectures", "model_type", "auto_map", "dtype", "head_dim"),
    *("rope_scaling", "rope_parameters", "attn_implementation", "text_config", "num_key_value_heads", "layer_types"),
)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def end(*about: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def train(folder: Path) -> str:
    """Return what a configuration was refused for; an error of another kind escapes."""
    try:
        step = step_of(str(folder), seq_len=8, batch_size=1)
        run_isolated(lambda: simulate_step(step))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"num_labels": 10**9}, "num_labels=1000000000 must be at most 1000000"),
        ({"quantization_config": "x"}, "quantization_config='x' must be an object"),
        ({"model_type": []}, r"model_type=\[\] must be a text"),
        ({"text_config": {"a": 1}}, "a text_config, which LlamaConfig does not know"),
    ],
)
def test_an_absurd_field_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ValueError, match=message):
        step_of(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_configuration_ends_in_a_traceback(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    refused = 0
    for number in range(50):
        kind = draw.choice([*KINDS])
        name, sizes = KINDS[kind]
        values = json.loads(getattr(transformers, name)(**sizes, architectures=[kind]).to_json_string(use_diff=False))
        for _ in range(draw.choice([1, 1, 2, 3])):
            values[draw.choice([*values, *OF_CONFIGS])] = draw.choice(VALUES)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        with within(60):
            refused += bool(train(folder))
    assert 5 < refused < 50  # some train


SPEC = {"seq_len": 16, "batch_size": 1, "lora_rank": 2, "gpu": "24GB", "dtype": "bfloat16", "precision": "no"}
ARGUMENTS: dict[str, Any] = {
    "max_length": 32,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 1,
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": ["q_proj"],
    "dtype": "bfloat16",
    "max_grad_norm": 1.0,
    "bf16": True,
    "optim": "adamw_torch",
    "gradient_checkpointing": True,
    "accelerator_config": {},
    "seed": 3,
    "attn_implementation": "sdpa",
    "fsdp": "",
    "deepspeed": None,
    "loss_type": "nll",
    "load_in_4bit": False,
}


def make_step(spec: Job) -> None:
    workloads.given_step(spec, workloads.workload_of(spec))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_r": ["a"]}, r"lora_r=\['a'\] must be int"),
        ({"per_device_train_batch_size": {}}, "per_device_train_batch_size={} must be int"),
        ({"gradient_checkpointing": 3}, "gradient_checkpointing=3 must be bool"),
        ({"model_name_or_path": 2}, r"model_name_or_path=2 must be str \| None"),
        ({"accelerator_config": {"a": 1}}, "SFTConfig refuses these fields .*unexpected keyword argument 'a'"),
    ],
)
def test_a_field_of_another_type_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "sft.json"
    file.write_text(json.dumps({"model_name_or_path": str(llama(tmp_path))} | ARGUMENTS | changes))
    with pytest.raises(ValueError, match=message):
        make_step(Job(training_args=file))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("reader", ["spec", "training_args"])
def test_no_file_ends_in_a_traceback(reader: str, seed: int, tmp_path: Path) -> None:
    draw, model, file = random.Random(seed), str(llama(tmp_path)), tmp_path / "job.json"
    plain = {"model": model} | SPEC if reader == "spec" else {"model_name_or_path": model} | ARGUMENTS
    refused = 0
    for _ in range(50):
        values = dict(plain)
        for _ in range(draw.choice([1, 1, 2, 3])):
            values[draw.choice([*values, *(FIELDS if reader == "spec" else ())])] = draw.choice([*VALUES, "none", 2, 4])
        file.write_text(json.dumps(values))
        with within(60):
            try:
                make_step(read_spec(file) if reader == "spec" else Job(training_args=file))
            except ValueError:
                refused += 1
    assert 5 < refused < 50


def llama(folder: Path) -> Path:
    transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "llama")
    return folder / "llama"


POLICIES = ("act", "diffusion", "pi05", "smolvla")


def write_run(kind: str, vlm: Path, folder: Path) -> Path:
    """Write the `train_config.json` of a policy, of whose backbone no weights are asked for."""
    random_weights = {"pretrained_backbone_weights": None} if kind in ("act", "diffusion") else {}
    file: Path = policy_toys.write_run(folder, kind, vlm, folder / "data", **random_weights)
    return file


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("act", "policy.chunk_size", 10**9, "policy.chunk_size=1000000000 must be at most 1000000"),
        ("act", "policy.n_heads", 0, "policy.n_heads=0 must be at least 1"),
        ("act", "policy.n_encoder_layers", 2**31, "policy.n_encoder_layers=2147483648 must be at most 1000"),
        ("act", "policy.dim_model", "x", "`dim_model`: Couldn't parse 'x' into an int"),
        ("act", "policy.type", [], r"is a policy of type '\[\]'; those that are simulated are act"),
        ("act", "batch_size", 0, "batch_size=0 must be at least 1"),
        ("smolvla", "policy.empty_cameras", 10**9, "policy.empty_cameras=1000000000 must be at most 1000"),
        ("smolvla", "policy.vlm_model_name", "x" * 300, "policy.vlm_model_name='x*': the VLM's config.json, .* cannot"),
        ("smolvla", "policy.output_features.action.shape", [0], "policy.output_features.action.shape=0 must be at lea"),
    ],
)
def test_an_absurd_field_of_a_run_is_named(
    kind: str, field: str, value: Any, message: str, toy_vlm: Path, tmp_path: Path
) -> None:
    file = write_run(kind, toy_vlm, tmp_path)
    values = json.loads(file.read_text())
    *parents, name = field.split(".")
    of = values
    for each in parents:
        of = of[each]
    of[name] = value
    file.write_text(json.dumps(values))
    with within(60), pytest.raises(ValueError, match=f"(?s){message}") as refused:
        make_step(Job(str(file)))
    assert str(file) in str(refused.value) or field in str(refused.value)


@pytest.mark.parametrize(
    "written",
    [
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"policy": {"type": "\\u001b[2J"}}',
        b'{"policy": ' + b"[" * 60 + b"]" * 60 + b"}",
    ],
)
def test_a_run_that_cannot_be_read_is_one_line(
    written: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train_config.json"
    file.write_bytes(written)
    with within(60):
        assert main(["estimate", str(file)]) == 2
    printed = capsys.readouterr().err
    assert (printed.count("\n"), "\x1b" in printed, str(file) in printed) == (1, False, True)
    assert len(printed) < 5000


def fields(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the places of all fields, those of objects within included."""
    for name, value in values.items():
        yield values, name
        if isinstance(value, dict):
            yield from fields(value)


def alike(value: Any) -> list[Any]:
    """Return the absurd values of the same type; of a list, also lists of as many such values."""
    if isinstance(value, list) and value:
        return [[each] * len(value) for each in alike(value[0])] + [each for each in VALUES if isinstance(each, list)]
    kinds = (int, float) if isinstance(value, float) else (type(value),)
    return [each for each in VALUES if type(each) in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_run_ends_in_a_traceback(seed: int, toy_vlm: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    plain = {kind: json.loads(write_run(kind, toy_vlm, tmp_path / kind).read_text()) for kind in POLICIES}
    file, refused = tmp_path / "train_config.json", 0
    for _ in range(50):
        kind = draw.choice(POLICIES)
        values = copy.deepcopy(plain[kind])
        for _ in range(draw.choice([1, 1, 2, 3])):
            policy = values["policy"] if isinstance(values["policy"], dict) and draw.random() < 0.7 else values
            of, name = draw.choice([*fields(policy)])
            of[name] = draw.choice((draw.random() < 0.8 and alike(of[name])) or VALUES)
        file.write_text(json.dumps(values))
        with within(60), policy_toys.toy_size(kind, toy_vlm):
            try:
                make_run(file)
            except ValueError:
                refused += 1
    assert 5 < refused < 50


def make_run(file: Path) -> None:
    spec = Job(str(file))
    step, _ = workloads.given_step(spec, workloads.workload_of(spec))
    run_isolated(lambda: simulate_step(step))
