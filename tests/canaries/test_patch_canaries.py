"""Canaries of the places at which simulations change other libraries, each file of changes a few tests."""

import importlib
import inspect
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator, accelerator
from huggingface_hub import constants, get_session, utils
from huggingface_hub.errors import OfflineModeIsEnabled
from late_imports import LateModule
from reliance import relied_on_by

from hf_memopt.planning.simulation import patched_hub

cache_utils = LateModule("transformers.cache_utils")
generation_utils = LateModule("transformers.generation.utils")
hub_kernels = LateModule("transformers.integrations.hub_kernels")
transformers = LateModule("transformers")
smolvlm_with_expert = LateModule("lerobot.policies.smolvla.smolvlm_with_expert")
grpo_trainer = LateModule("trl.trainer.grpo_trainer")

SIMULATION = "hf_memopt/planning/simulation"
ACCELERATE = f"{SIMULATION}/patched_accelerate.py"
HUB = f"{SIMULATION}/patched_hub.py"
LEROBOT = f"{SIMULATION}/patched_lerobot.py"
TRANSFORMERS = f"{SIMULATION}/patched_transformers.py"
TRL = f"{SIMULATION}/patched_trl.py"


def test_the_hub_reads_its_switches_at_each_request() -> None:
    with relied_on_by(HUB):
        with patched_hub.offline(), pytest.raises(OfflineModeIsEnabled):
            get_session().head(constants.ENDPOINT)
        assert "constants.HF_HUB_DISABLE_TELEMETRY" in inspect.getsource(utils.send_telemetry)


def test_accelerate_reads_the_precision_from_its_state_when_it_prepares_a_model() -> None:
    with relied_on_by(ACCELERATE):
        made = Accelerator(cpu=True, mixed_precision="bf16")
        with patch.object(made.state, "_mixed_precision", "no"):
            assert made.mixed_precision == "no"
        assert "self.mixed_precision" in inspect.getsource(Accelerator.prepare_model)
        assert "fsdp2_prepare_model(self, model)" in inspect.getsource(accelerator.Accelerator._prepare_fsdp2)


def test_hub_kernels_are_loaded_by_one_name() -> None:
    with relied_on_by(TRANSFORMERS):
        assert "get_kernel_hub(" in inspect.getsource(hub_kernels.get_kernel)


def test_auto_classes_build_a_model_in_a_dtype_from_its_configuration() -> None:
    with relied_on_by(TRANSFORMERS):
        config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        assert model.dtype == torch.bfloat16


def test_trainer_prepares_in_one_method_and_keeps_its_device() -> None:
    with relied_on_by(TRANSFORMERS):
        source = inspect.getsource(transformers.Trainer._inner_training_loop)
        assert "self._prepare_for_training(" in source
        assert "self.accelerator.free_memory()" in source
        assert "_setup_devices" in vars(transformers.TrainingArguments)


def test_generation_asks_before_each_step_and_goes_on_from_a_longer_cache() -> None:
    with relied_on_by(TRANSFORMERS):
        assert "while self._has_unfinished_sequences(" in inspect.getsource(generation_utils.GenerationMixin._sample)
        layer = cache_utils.DynamicLayer()
        layer.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
        layer.keys = layer.values = torch.zeros(1, 1, 7, 4)
        assert layer.get_seq_length() == 7
        sliding = cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
        assert (sliding.cumulative_length, sliding.sliding_window) == (0, 4)


@pytest.mark.parametrize("trainer", ["sft", "dpo", "grpo"])
def test_trls_constructors_ask_for_marks_plugins_and_models_by_these_names(trainer: str) -> None:
    with relied_on_by(TRL):
        source = inspect.getsource(importlib.import_module(f"trl.trainer.{trainer}_trainer"))
        assert 'getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)' in source
        assert "args.deepspeed_plugin.zero_stage" in source
        assert "create_model_from_path(" in source
        source = inspect.getsource(transformers.Trainer.__init__)
        assert "self.create_accelerator_and_postprocess()" in source


def test_grpo_generates_in_these_methods_at_multiples_of_its_own_step() -> None:
    with relied_on_by(TRL):
        kind = grpo_trainer.GRPOTrainer
        assert "self._generate_single_turn(" in inspect.getsource(kind._generate)
        source = inspect.getsource(kind._prepare_inputs)
        assert "self._generate_and_score_completions(" in source
        assert "self._step % generate_every == 0" in source
        assert "gradient_accumulation_steps" in inspect.getsource(kind._generate_and_score_completions)
        assert "self.use_vllm = args.use_vllm" in inspect.getsource(kind.__init__)


def test_a_smolvla_loads_its_vlm_by_two_classes() -> None:
    with relied_on_by(LEROBOT):
        source = inspect.getsource(smolvlm_with_expert.SmolVLMWithExpertModel.__init__)
        assert "AutoModelForImageTextToText.from_pretrained(" in source
        assert "self.processor = AutoProcessor.from_pretrained(" in source
