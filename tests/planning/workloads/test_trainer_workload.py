from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from late_imports import LateModule
from transformers_toys import BATCH, CARD, TOKENS, FolderOf, estimate, options_of, step_of, workload_of

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.estimate_report import needed_bytes
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.units import MIB

sft_options = LateModule("hf_memopt.recipes.sft.options")
model_levers = LateModule("hf_memopt.planning.workloads.model_levers")
jobs = LateModule("hf_memopt.planning")
transformers = LateModule("transformers")


def test_a_config_file_will_do(qwen3: str) -> None:
    assert options_of(f"{qwen3}/config.json", seq_len=TOKENS).kind == "causal"


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
    step = step_of(qwen3, seq_len=TOKENS, batch_size=BATCH, checkpointing="none", offload="auto")
    assert step.num_steps == 5  # two are recorded, one is plain, one is timed
    assert estimate(qwen3, offload="auto", precision="bf16").confidence == "medium"


def test_the_recipe_reads_what_is_written(qwen3: str, tmp_path: Path) -> None:
    workload = workload_of(qwen3, seq_len=TOKENS, effective_batch=8, dtype="float32")
    accelerate, flags = workload.write({"activations": "checkpointed, inputs offloaded"}, 2, tmp_path)
    assert load_config_from_file(str(accelerate)).mixed_precision == "bf16"
    assert yaml.safe_load(accelerate.read_text())["num_processes"] == 1
    _, model, training, memopt = sft_options.parse("", ["--config", str(flags)])
    assert (model.model_name_or_path, model.dtype, training.bf16) == (qwen3, "float32", True)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (memopt.offload, training.gradient_checkpointing, training.max_length) == ("inputs", True, TOKENS)
    assert workload.command([accelerate, flags]) == (
        f"accelerate launch --config_file {accelerate} -m hf_memopt.recipes.train_sft --config {flags}"
    )


def test_gpus_share_a_model_and_its_batch(qwen3: str, plain: MemoryEstimate, tmp_path: Path) -> None:
    shared = {"seq_len": TOKENS, "effective_batch": 8, "num_gpus": 2, "batch_size": BATCH, "dtype": "float32"}
    workload = workload_of(qwen3, **shared, engine="fsdp2", checkpointing="none")
    assert ", on each of 2 GPUs with fsdp2" in workload.name
    assert workload.micro_batches == [1, 2, 4]
    assert {model_levers.ACTIVATIONS[name][1] for name in workload.levers[0].values} == {"off"}
    sharded = run_isolated(lambda: simulate_step(workload.as_given(), gpu=CARD))
    for kind in ("parameters", "optimizer state"):
        assert plain.breakdown[kind] / 2 <= sharded.breakdown[kind] < 0.6 * plain.breakdown[kind]
    assert "gathered weights" in sharded.storage_kinds
    assert "communication buffers" in sharded.storage_kinds
    written = workload.write({"activations": "on the device"}, BATCH, tmp_path)
    assert [path.name for path in written] == ["accelerate.yaml", "sft.yaml"]
    assert load_config_from_file(str(written[0])).num_processes == 2
    assert yaml.safe_load(written[1].read_text())["gradient_accumulation_steps"] == 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"optimizer": "sgd", "max_grad_norm": "none"}])
def test_gpus_share_a_model_with_deepspeed(engine: str, options: dict[str, Any], qwen3: str, tmp_path: Path) -> None:
    shared = {"seq_len": TOKENS, "effective_batch": 8, "num_gpus": 2, "precision": "fp16"}
    workload = workload_of(qwen3, **shared, **options, engine=engine, batch_size=BATCH, checkpointing="full")
    estimate = run_isolated(lambda: simulate_step(workload.as_given(), gpu=CARD))
    assert "communication buffers" in estimate.storage_kinds
    assert estimate.unreached == ()
    accelerate = workload.write({"activations": "on the device"}, BATCH, tmp_path)[0]
    assert load_config_from_file(str(accelerate)).deepspeed_config["gradient_accumulation_steps"] == 2


ONE = {"seq_len": TOKENS, "batch_size": 1, "dtype": "float32", "precision": "no", "checkpointing": "none"}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("home", "quantize"), [("host", "none"), ("file", "nf4"), ("host", "int8-llm"), ("file", "int8-torchao")]
)
@pytest.mark.sweep(share=0.4)
def test_frozen_weights_stream(home: str, quantize: str, folder_of: FolderOf) -> None:
    model = folder_of("qwen3", **WIDE)
    options = {"lora_rank": 2, "precision": "bf16", "quantize": quantize}
    resident, streamed = (estimate(model, "full", base=base, **options) for base in (None, home))
    assert resident.streamed is None
    assert streamed.streamed is not None
    assert streamed.peak_bytes < resident.peak_bytes
    assert streamed.breakdown["frozen parameters"] < 0.2 * resident.breakdown["frozen parameters"]
    assert streamed.streamed.bytes_read == (streamed.streamed.bytes_to_device if home == "file" else 0)
    assert streamed.unreached == resident.unreached


@pytest.mark.e2e
@pytest.mark.slow
def test_streamed_weights_do_without_a_hot_set_or_with_one(folder_of: FolderOf) -> None:
    model = folder_of("qwen3", **WIDE)
    options = {"lora_rank": 2, "dtype": "bfloat16", "base": "host"}
    least, more = (estimate(model, base_budget=budget, **options).streamed for budget in (None, "3MiB"))
    assert least is not None
    assert more is not None
    assert least.peak_bytes < more.peak_bytes <= 3 * 2**20
    assert more.bytes_to_device < least.bytes_to_device
    twice = estimate(model, num_micro_batches=2, **options).streamed
    assert twice is not None
    assert twice.bytes_to_device == 2 * least.bytes_to_device


@pytest.mark.e2e
@pytest.mark.parametrize("offload", ["all", "inputs"])
@pytest.mark.sweep(share=0.5)
def test_weights_stream_while_activations_are_offloaded(offload: str, folder_of: FolderOf) -> None:
    model = folder_of("qwen3", **WIDE)
    found = estimate(model, "full", offload, lora_rank=2, dtype="bfloat16", base="host").streamed
    assert found == estimate(model, "full", lora_rank=2, dtype="bfloat16", base="host").streamed


def test_experts_with_adapters_stream(folder_of: FolderOf) -> None:
    """PEFT parametrizes the experts' weights in each forward pass, and torch sets them to their own memory for it."""
    plain, streamed = (estimate(folder_of("mixtral"), lora_rank=2, base=base) for base in (None, "host"))
    assert streamed.breakdown["frozen parameters"] < plain.breakdown["frozen parameters"]


def test_a_plan_tries_the_homes_of_frozen_weights_and_says_which_is_chosen(qwen3: str, tmp_path: Path) -> None:
    workload = workload_of(qwen3, seq_len=TOKENS, lora_rank=4)
    lever = workload.levers[-1]
    assert (lever.name, lever.values) == ("base", ("off", "host", "file"))
    assert lever.without_disk().values == ("off", "host")
    settings = {"activations": "on the device", "base": "host"}
    assert workload.simulated(settings, 8).num_steps == 3
    written = workload.write(settings, 8, tmp_path)
    _, model, _, memopt = sft_options.parse("", ["--config", str(written[1])])
    assert (model.use_peft, model.lora_r, model.lora_target_modules, memopt.base) == (True, 4, "all-linear", "host")
    assert workload_of(qwen3, seq_len=TOKENS, lora_rank=4, base="file").levers[-1].values == ("file",)
    resident = workload_of(qwen3, seq_len=TOKENS, lora_rank=4, base="off")
    for without in (resident, workload_of(qwen3, seq_len=TOKENS, vary="base")):
        assert [lever.name for lever in without.levers] == ["activations"]
        assert without.command(without.write({"activations": "on the device"}, 8, tmp_path)).startswith(
            "accelerate launch "
        )


@pytest.mark.e2e
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16", "num_micro_batches": 2},
        {"dtype": "bfloat16", "max_grad_norm": "none"},
        {"lora_rank": 4, "precision": "fp16"},
        {"optimizer": "adafactor"},
    ],
    ids=["float32", "bf16", "bfloat16", "lora", "adafactor"],
)
@pytest.mark.sweep(share=0.4)
def test_the_optimizers_state_lives_on_the_host_or_in_a_file(options: dict[str, Any], folder_of: FolderOf) -> None:
    model = folder_of("qwen3", **WIDE)
    plain, host, file = (estimate(model, optimizer_home=home, **options) for home in ("off", "host", "file"))
    state = plain.breakdown["optimizer state"]  # in blocks of 512 bytes, counters included
    assert host.host_bytes - plain.host_bytes == pytest.approx(state, rel=0.15)
    assert 0.85 * state <= file.disk_bytes_written <= file.disk_bytes <= file.disk_bytes_written + 2 * MIB
    assert host.peak_bytes == file.peak_bytes
    assert host.breakdown.get("optimizer state", 0) <= 0.5 * state
    assert plain.disk_bytes == host.disk_bytes == 0
    assert host.unreached == plain.unreached


@pytest.mark.e2e
def test_a_plan_prefers_a_home_that_is_faster_than_what_else_fits(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices(options: Any, varied: Any) -> Any:
        """Leave out engines and few bits, which take long to simulate."""
        found = model_levers.choices_of(options, varied)
        homes = {name: each for name, each in found["optimizer"].items() if {"engine", "optimizer"}.isdisjoint(each)}
        return {"activations": {"on the device": {}}, "optimizer": homes}

    monkeypatch.setattr("hf_memopt.planning.workloads.trainer_workload.choices_of", choices)
    model = folder_of("qwen3", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    workload = workload_of(model, **ONE, vary="optimizer")
    plain = run_isolated(lambda: simulate_step(workload.as_given(), gpu=CARD))
    card = replace(CARD, memory_bytes=needed_bytes(plain, CARD) - 20 * MIB)
    best = jobs.plan(workload, gpu=card, disk="1GiB", num_workers=1, progress=False).best
    assert best.settings == {"activations": "on the device", "optimizer": "adamw, state on host"}
    assert best.fits
    sft_file = workload.write(best.settings, 1, tmp_path)[1]
    options = sft_options.parse("", ["--config", str(sft_file)])
    assert options.memopt.optimizer_home == "host"


@pytest.mark.e2e
@pytest.mark.slow
def test_a_plan_has_weights_visit_where_the_state_alone_is_not_enough(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices(options: Any, varied: Any) -> Any:
        homes = model_levers.choices_of(options, varied)["optimizer"]
        tried = ("adamw", "adamw, state on host", "adamw, weights and gradients on host")
        return {"activations": {"on the device": {}}, "optimizer": {name: homes[name] for name in tried}}

    monkeypatch.setattr("hf_memopt.planning.workloads.trainer_workload.choices_of", choices)
    model = folder_of("qwen3", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    workload = workload_of(model, **ONE, vary="optimizer")
    on_host = workload.simulated({"activations": "on the device", "optimizer": "adamw, state on host"}, 1)
    needed = needed_bytes(run_isolated(lambda: simulate_step(on_host, gpu=CARD)), CARD)
    card = replace(CARD, memory_bytes=needed - 20 * MIB)
    best = jobs.plan(workload, gpu=card, num_workers=1, progress=False).best
    assert best.settings == {"activations": "on the device", "optimizer": "adamw, weights and gradients on host"}
    assert best.fits
    written = workload.write(best.settings, 1, tmp_path)
    *_, memopt = sft_options.parse("", ["--config", str(written[1])])
    assert (memopt.base, memopt.trained, memopt.optimizer_home) == ("host", True, "off")
    assert workload.command(written).endswith(f" -m hf_memopt.recipes.train_sft --config {written[1]}")


def test_the_launched_command_has_weights_that_train_in_files(folder_of: FolderOf, tmp_path: Path) -> None:
    workload = workload_of(folder_of("bert"), seq_len=TOKENS, vary="optimizer")
    settings = {"activations": "on the device", "optimizer": "adamw, weights and gradients in files"}
    command = workload.command(workload.write(settings, 8, tmp_path))
    assert " --base file --trained -- " in command
    given = workload_of(folder_of("bert"), seq_len=TOKENS, batch_size=8, base="file", trained=True)
    assert given.name.endswith(", weights and gradients in a file, optimizer's state in a file")


@pytest.mark.e2e
def test_adapters_train_with_a_home_on_a_base_that_streams(folder_of: FolderOf) -> None:
    model = folder_of("qwen3", **WIDE)
    options = {"lora_rank": 2, "precision": "bf16", "base": "host"}
    frozen, trained = (estimate(model, trained=trained, **options) for trained in (False, True))
    assert frozen.streamed is not None
    assert trained.streamed is not None
    assert frozen.streamed.bytes_to_home == 0 < trained.streamed.bytes_to_home < 0.1 * trained.streamed.bytes_to_device
    assert trained.peak_bytes <= frozen.peak_bytes
    assert trained.unreached == frozen.unreached


@pytest.mark.parametrize("home", ["host", "file"])
def test_the_launched_command_has_the_home(home: str, folder_of: FolderOf, tmp_path: Path) -> None:
    workload = workload_of(folder_of("bert"), seq_len=TOKENS, optimizer_home=home)
    command = workload.command(workload.write({"activations": "on the device"}, 8, tmp_path))
    assert f" --optimizer_home {home} -- " in command


def test_a_model_without_a_recipe_is_left_to_a_script_that_reads_training_arguments(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    workload = workload_of(folder_of("bert"), seq_len=TOKENS, effective_batch=4, batch_size=1, precision="bf16")
    written = workload.write({"activations": "selectively checkpointed"}, 1, tmp_path)
    assert [path.name for path in written] == ["accelerate.yaml", "settings.json"]
    command = workload.command(written)
    launched = f"hf-memopt launch --config_file {written[0]} --selective_checkpointing"
    assert command.startswith(f"{launched} -- train.py ")
    flags = command.partition(" -- train.py ")[2].split()
    (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(
        [*flags, f"--output_dir={tmp_path}", "--use_cpu", "true"]
    )
    assert (arguments.gradient_accumulation_steps, arguments.optim, arguments.bf16) == (4, "adamw_torch_fused", True)


def test_fsdp_reduces_gradients_in_each_pass_where_they_go_to_the_host(qwen3: str, tmp_path: Path) -> None:
    sharded = {"engine": "fsdp2", "optimizer_on": "host", "effective_batch": 4, "batch_size": 1}
    workload = workload_of(qwen3, seq_len=TOKENS, **sharded)
    accelerate, flags = workload.write({"activations": "on the device"}, 1, tmp_path)
    assert load_config_from_file(str(accelerate)).fsdp_config["fsdp_offload_params"] is True
    _, _, training, _ = sft_options.parse("", ["--config", str(flags)])
    assert training.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"checkpointing": "most"}, "checkpointing='most' is unknown"),
        ({"offload": "disk"}, "offload='disk' is unknown"),
        ({"checkpointing": "none", "offload": "inputs"}, "use checkpointing='full'"),
        (
            {"batch_size": 3, "effective_batch": 8},
            "effective_batch=8 must be a multiple of per_device_train_batch_size=3",
        ),
    ],
)
def test_steps_are_checked(flags: dict[str, Any], message: str, qwen3: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(qwen3, seq_len=TOKENS, **flags)
