"""A trainer's estimate, its real memory on the CPU, and the estimate of the same model by flags."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_trainers
from accelerate.state import AcceleratorState
from counted_allocator import CountedAllocator
from late_imports import LateModule
from transformers_toys import step_of

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

estimates = LateModule("hf_memopt.planning.workloads.trainer_estimate")
batches = LateModule("hf_memopt.planning.workloads.trainer_batches")
simulated = LateModule("hf_memopt.planning.workloads.simulated_trainer")
callbacks = LateModule("hf_memopt.callbacks")

plain, sft, dpo = trl_trainers.plain, trl_trainers.sft, trl_trainers.dpo
BLOCK = 512

pytestmark = pytest.mark.filterwarnings("ignore")


REAL: dict[str, Callable[[Path], Any]] = {
    "Trainer": plain,
    "accumulation, checkpointed, bf16": lambda folder: plain(
        folder, gradient_accumulation_steps=2, gradient_checkpointing=True, bf16=True
    ),
    "no clipping, Adafactor": lambda folder: plain(folder, optim="adafactor", max_grad_norm=0),
    "SFT": sft,
    "SFT with LoRA, bf16": lambda folder: sft(folder, lora=True, bf16=True),
    "DPO with its reference model": dpo,
    "KTO with its reference model": trl_trainers.kto,
    "ORPO": trl_trainers.orpo,
    "a reward model": trl_trainers.reward,
    "GRPO": trl_trainers.grpo,
    "GRPO that keeps probabilities of its generation": lambda folder: trl_trainers.grpo(
        folder, max_completion_length=16, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_iterations=2
    ),
    "GRPO that generates twice in an update": lambda folder: trl_trainers.grpo(
        folder, max_completion_length=16, gradient_accumulation_steps=4, steps_per_generation=2
    ),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.sweep(share=0.25)
def test_it_holds_on_a_cpu_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    make = REAL[name]
    estimate = on_cpu(make(tmp_path))
    trainer = make(tmp_path)
    ahead = batches.num_bytes(next(iter(trainer.get_train_dataloader())))
    # On the CPU the batch that the dataloader has drawn ahead is in the same memory, beside a few numbers.
    assert 0 <= real_peak(trainer) - estimate.peak_bytes <= ahead + 12


@pytest.mark.e2e
@pytest.mark.slow
def test_generation_holds_on_a_cpu_what_the_estimate_says_but_for_copies_of_its_tokens(tmp_path: Path) -> None:
    batch, length = 256, 2 + 16
    options = {"max_completion_length": 16, "per_device_train_batch_size": 1, "gradient_accumulation_steps": batch}
    estimate = on_cpu(trl_trainers.grpo(tmp_path, num_generations=64, **options))
    assert estimate.phase == "generation"
    real = real_peak(trl_trainers.grpo(tmp_path, num_generations=64, **options))
    assert 0 <= estimate.peak_bytes - real <= 3 * batch * length * 8


def on_cpu(trainer: Any) -> MemoryEstimate:
    step = estimates.trainer_step(trainer, batches.largest_window(trainer, 8))
    return estimate_peak_memory(step.setup, step.step, like="cpu")


def real_peak(trainer: Any) -> int:
    """Return the most bytes that storages hold while a trainer makes two updates."""
    allocator = CountedAllocator()
    for _, module in simulated.modules_of(trainer):
        allocator.charge((*module.parameters(), *module.buffers()))
    gc.collect()
    allocator.reset_peaks()
    trainer.args.max_steps = 2
    with allocator:
        trainer.train()
    return allocator.peak_bytes


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32, foreach": ({"optim": "adamw_torch"}, {"optimizer": "adamw-foreach"}),
    "fp16": ({"fp16": True}, {"precision": "fp16"}),
    "bf16, checkpointed": (
        {"bf16": True, "gradient_checkpointing": True},
        {"precision": "bf16", "checkpointing": "full"},
    ),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.sweep(share=0.3)
def test_it_is_the_estimate_of_the_same_run_by_flags(name: str, tmp_path: Path) -> None:
    arguments, flags = SAME[name]
    trainer = plain(tmp_path, **arguments)
    trainer.model.config.save_pretrained(tmp_path / "config")
    found = estimates.estimate_trainer(trainer)
    given = {"trainer": "trainer", "dtype": "float32", "task": "causal", **flags}
    step = step_of(str(tmp_path / "config"), seq_len=64, batch_size=4, **given)
    expected = run_isolated(lambda: simulate_step(step))
    assert (found.phase, found.step, found.reserved_bytes) == (expected.phase, expected.step, expected.reserved_bytes)
    assert found.breakdown == expected.breakdown


def test_nothing_of_the_trainer_or_of_this_process_changes(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    state, arguments = dict(AcceleratorState._shared_state), trainer.args.to_dict()
    random = torch.get_rng_state()
    estimates.estimate_trainer(trainer)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in trainer.model.parameters())
    assert AcceleratorState._shared_state == state
    assert trainer.args.to_dict() == arguments
    assert torch.equal(torch.get_rng_state(), random)
    assert trainer.optimizer is None
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_trainer_that_has_trained_needs_what_it_needed_before(tmp_path: Path) -> None:
    trainer = sft(tmp_path, bf16=True, max_steps=1)
    before = estimates.estimate_trainer(trainer)
    trainer.train()
    assert estimates.estimate_trainer(trainer).breakdown == before.breakdown


def test_the_update_with_the_longest_sample_counts(tmp_path: Path) -> None:
    def peak(lengths: Callable[[int], int], **options: Any) -> MemoryEstimate:
        return estimates.estimate_trainer(plain(tmp_path, lengths, train_sampling_strategy="sequential"), **options)

    longest = peak(lambda number: 64)
    assert peak(lambda number: 64 if number == 9 else 8).peak_bytes == longest.peak_bytes
    partly = peak(lambda number: 64 if number == 9 else 8, num_batches=2)
    assert partly.peak_bytes < longest.peak_bytes
    assert partly.assumptions[-1] == "no batch is larger than the largest of the first 2 of the data"
    assert not any("no batch" in assumption for assumption in longest.assumptions)


def test_a_disk_is_simulated_before_and_after_training(tmp_path: Path) -> None:
    from hf_memopt import ActivationOffloader

    trainer = plain(tmp_path)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0.01, disk=tmp_path, host_budget_gib=1 / 1024)
    callbacks.attach(trainer, offloader=offloader)
    before = estimates.estimate_trainer(trainer)
    assert before.disk_bytes_written > 0
    trainer.train()
    assert offloader.stats.disk_bytes_written > 0
    assert estimates.estimate_trainer(trainer).disk_bytes_written == before.disk_bytes_written


def test_what_attach_offloads_leaves_the_device(tmp_path: Path) -> None:
    from hf_memopt import ActivationOffloader

    trainer = plain(tmp_path)
    kept = estimates.estimate_trainer(trainer)
    handle = callbacks.attach(trainer, offloader=ActivationOffloader(mode="all", offload_threshold_mb=0.01))
    moved = estimates.estimate_trainer(trainer)
    assert moved.host_bytes > kept.host_bytes
    assert moved.peak_bytes < kept.peak_bytes
    handle.remove()
    callbacks.attach(trainer)
    with pytest.raises(ValueError, match="gpu=None: the attached offloader weighs copies"):
        estimates.estimate_trainer(trainer)
    planned = estimates.estimate_trainer(trainer, gpu="rtx4090")
    assert planned.step_ms is not None


def test_a_model_without_memory_can_be_estimated(tmp_path: Path) -> None:
    here = estimates.estimate_trainer(plain(tmp_path))
    meta = plain(tmp_path, model=trl_trainers.decoder().to("meta"), bf16_full_eval=True)
    assert estimates.estimate_trainer(meta).breakdown == here.breakdown


def test_an_optimizer_of_the_users_own_is_simulated(tmp_path: Path) -> None:
    model = trl_trainers.decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = estimates.estimate_trainer(plain(tmp_path, model=model, optimizers=(optimizer, None)))
    blocks = sum(-(-parameter.nbytes // BLOCK) * BLOCK for parameter in model.parameters())
    assert found.breakdown["optimizer state"] == blocks


def test_a_reference_model_is_no_trained_one(tmp_path: Path) -> None:
    found = estimates.estimate_trainer(dpo(tmp_path))
    assert found.unreached == ()
    assert found.confidence == "high"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fsdp", "full_shard", "fsdp='full_shard' is not simulated"),
        ("deepspeed", "zero.json", "deepspeed='zero.json' is not simulated"),
        ("use_liger_kernel", True, "use_liger_kernel=True is not simulated"),
        ("activation_offloading", True, "activation_offloading=True is not simulated"),
        ("precompute_ref_log_probs", True, "precompute_ref_log_probs=True is not simulated"),
        ("_n_gpu", 2, "n_gpu=2 is not simulated"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(field: str, value: Any, message: str, tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    setattr(trainer.args, field, value)
    with pytest.raises(ValueError, match=message):
        estimates.estimate_trainer(trainer)


def test_trainers_that_generate_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation \(RLOOTrainer\) is not simulated"):
        estimates.estimate_trainer(trl_trainers.rloo(tmp_path))


def test_a_base_that_streams_is_refused(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    trainer.model.model.layers[0].requires_grad_(False)
    callbacks.attach(trainer, base="host", offloader=None)
    with pytest.raises(ValueError, match="a base that streams is not simulated; estimate a trainer without it"):
        estimates.estimate_trainer(trainer)


def test_weights_of_other_types_are_refused(tmp_path: Path) -> None:
    class Packed(torch.nn.Parameter):
        pass

    trainer = plain(tmp_path)
    trainer.model.lm_head.weight = Packed(trainer.model.lm_head.weight.detach())
    with pytest.raises(ValueError, match=r"lm_head\.weight is a Packed"):
        estimates.estimate_trainer(trainer)


def test_no_batches_and_no_count_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_batches"):
        estimates.estimate_trainer(plain(tmp_path), num_batches=0)
    with pytest.raises(ValueError, match="the trainer's dataloader has no batch"):
        estimates.estimate_trainer(plain(tmp_path, per_device_train_batch_size=32, dataloader_drop_last=True))


def test_trls_loss_holds_one_tile_of_logits(tmp_path: Path) -> None:
    found = estimates.estimate_trainer(trl_trainers.sft(tmp_path, bf16=True))
    tiles = [tensor for tensor in found.top if tensor.shape[-1:] == (32768,)]
    assert [(tensor.kind, tensor.dtype) for tensor in tiles] == [("temporaries", "bfloat16")]
    assert found.breakdown["temporaries"] < 1.1 * tiles[0].num_bytes


def test_a_reference_on_the_host_is_on_the_device_for_its_calls_alone(tmp_path: Path) -> None:
    plain = estimates.estimate_trainer(trl_trainers.dpo(tmp_path))
    trainer = trl_trainers.dpo(tmp_path)
    callbacks.attach(trainer, offloader=None, memory=False, frozen="swap")
    found = estimates.estimate_trainer(trainer)
    weights = sum(parameter.nbytes for parameter in trainer.ref_model.parameters())
    assert "teacher" in found.storage_kinds
    assert plain.phases["backward"] - found.phases["backward"] >= weights
