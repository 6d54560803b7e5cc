"""The few steps of generation that are simulated, against all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl_trainers
from late_imports import LateModule

from hf_memopt.planning import MemoryEstimate, estimate_peak_memory

estimates = LateModule("hf_memopt.planning.workloads.trainer_estimate")
batches = LateModule("hf_memopt.planning.workloads.trainer_batches")
simulated = LateModule("hf_memopt.planning.workloads.simulated_trainer")
trl_utils = LateModule("trl.trainer.utils")
generation = LateModule("hf_memopt.planning.simulation.patched_transformers")
cache_utils = LateModule("transformers.cache_utils")

pytestmark = pytest.mark.filterwarnings("ignore")
SHORT: dict[str, Any] = {"max_completion_length": 12, "bf16": True}


def estimated(trainer: Any) -> MemoryEstimate:
    step = estimates.trainer_step(trainer, batches.largest_window(trainer, 8))
    return estimate_peak_memory(step.setup, step.step, gpu="rtx4090")


@pytest.mark.e2e
def test_the_first_and_the_last_steps_hold_as_much_as_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = estimated(trl_trainers.grpo(tmp_path, **SHORT))
    monkeypatch.setattr(generation, "_NUM_RUN", 10**6)
    whole = estimated(trl_trainers.grpo(tmp_path, **SHORT))
    assert few.phases == whole.phases
    assert few.breakdown == whole.breakdown
    assert few.phases["generation"] > 0


def test_generation_takes_no_told_time(tmp_path: Path) -> None:
    found = estimated(trl_trainers.grpo(tmp_path, **SHORT))
    assert "generation" in found.phases
    assert "generation" not in found.phases_ms
    assert found.phases_ms["forward"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_longer_completion_keeps_more_keys_and_values(tmp_path: Path) -> None:
    def held(length: int) -> int:
        many = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 64, "num_generations": 64}
        found = estimated(trl_trainers.grpo(tmp_path, max_completion_length=length, **many))
        return found.phases["generation"]

    # 2 layers, keys and values of 64 numbers, for 128 completions; for a time a layer has its old and its new ones.
    each = 128 * 64 * 4
    assert 4 * each * 256 <= held(512) - held(256) <= 6 * each * 256


def test_the_reference_is_there_for_a_penalty_alone(tmp_path: Path) -> None:
    trainer = trl_trainers.grpo(tmp_path, **SHORT)
    assert trainer.ref_model is None
    without = estimated(trainer)
    trainer = trl_trainers.grpo(tmp_path, **SHORT)
    trainer.beta, trainer.ref_model = 0.1, trl_trainers.decoder()
    trl_utils.add_fused_lm_head(trainer.ref_model)
    weights = sum(weight.nbytes for weight in trainer.ref_model.parameters())
    assert estimated(trainer).phases["optimizer"] - without.phases["optimizer"] >= weights


def test_a_server_generates_without_memory_here(tmp_path: Path) -> None:
    here = estimated(trl_trainers.grpo(tmp_path, max_completion_length=256, num_generations=4, bf16=True))
    trainer = trl_trainers.grpo(tmp_path, max_completion_length=256, num_generations=4, bf16=True)
    trainer.use_vllm = True
    served = estimated(trainer)
    assert served.unreached == here.unreached == ()
    assert served.peak_bytes >= here.peak_bytes  # it keeps the server's probabilities


def test_an_update_with_several_generations_generates_in_each_pass(tmp_path: Path) -> None:
    def generations(**options: Any) -> int:
        trainer, seen = trl_trainers.grpo(tmp_path, max_completion_length=4, **options), []
        window = batches.largest_window(trainer, 8)
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: seen.append(len(inputs)) or score(inputs)
        made = simulated.SimulatedTrainer(trainer, window, torch.device("cpu"))
        for weight in trainer.model.parameters():
            torch.nn.init.zeros_(weight)
        made.step()
        return len(seen)

    assert generations(gradient_accumulation_steps=4) == 1
    assert generations(gradient_accumulation_steps=4, steps_per_generation=1) == 2


def test_each_kind_of_layer_gets_its_length() -> None:
    cache = cache_utils.DynamicCache()
    cache.layers = [cache_utils.DynamicLayer(), cache_utils.DynamicSlidingWindowLayer(sliding_window=8)]
    for layer in cache.layers:
        layer.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    generation._lengthen(cache, 50)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 50, 4), (1, 2, 7, 4)]
    assert [layer.get_seq_length() for layer in cache.layers] == [50, 50]
