"""Every recipe's workload at a size that a CPU trains at once."""

from pathlib import Path
from typing import Any

import torch
from late_imports import LateModule
from lgt_toys import TINY
from safetensors.torch import save_file

from hf_memopt.recipes.lgt import workload as lgt_plan
from hf_memopt.recipes.lgt.options import parse

configuration_smolvla_reflow = LateModule("hf_memopt.lerobot.configuration_smolvla_reflow")
causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
fluxflow_options = LateModule("hf_memopt.recipes.fluxflow.options")
neural_operator_options = LateModule("hf_memopt.recipes.neural_operator.options")
recipe_flags = LateModule("hf_memopt.recipes.common.flags")
causal_lm_plan = LateModule("hf_memopt.recipes.causal_lm.workload")
auto_plan = LateModule("hf_memopt.recipes.common.auto_plan")
fluxflow_plan = LateModule("hf_memopt.recipes.fluxflow.workload")
neural_operator_plan = LateModule("hf_memopt.recipes.neural_operator.workload")
reflow_smolvla_plan = LateModule("hf_memopt.recipes.reflow.workload")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
configs = LateModule("lerobot.configs")
configuration_smolvla = LateModule("lerobot.policies.smolvla.configuration_smolvla")


ROOT = Path(__file__).parents[2]
CAUSAL_LM = (
    f"--text_file={ROOT / 'LICENSE'}",
    "--vocab_size=300",
    "--config_overrides=hidden_size=32,intermediate_size=64,num_hidden_layers=3,num_attention_heads=2,"
    "num_key_value_heads=1,head_dim=16,max_position_embeddings=128,tie_word_embeddings=true",
)
FLUXFLOW = (
    "--channels",
    "8",
    "16",
    "--discriminator_channels=8",
    "--discriminator_layers=2",
    "--resolution=32",
    "--lpips_weights=random",
)
NEURAL_OPERATOR = ("--modes=6", "--hidden_channels=8", "--batch_size=8")


def causal_lm(folder: Path, *flags: str, **options: Any) -> Any:
    return causal_lm_plan.workload(_config_file(folder, causal_lm_options, CAUSAL_LM + flags), **options)


def fluxflow(folder: Path, *flags: str, **options: Any) -> Any:
    return fluxflow_plan.workload(_config_file(folder, fluxflow_options, FLUXFLOW + flags), **options)


def lgt(folder: Path, *flags: str, **options: Any) -> Any:
    return lgt_plan.LatentTransferWorkload(lgt_config(*flags), **options)


def neural_operator(folder: Path, *flags: str, **options: Any) -> Any:
    return neural_operator_plan.workload(
        _config_file(folder, neural_operator_options, NEURAL_OPERATOR + flags), **options
    )


def lgt_config(*flags: str) -> Any:
    return parse("", [*(f"--{name}={value}" for name, value in TINY.items()), *flags])


def smolvla(folder: Path, vlm: Path, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    return reflow_smolvla_plan.workload(write_student(folder, vlm, **fields), **(options or {}))


def write_student(folder: Path, vlm: Path, **fields: Any) -> Path:
    """Write configurations of teacher and student without weights, and return the student's folder."""
    image = configs.PolicyFeature(configs.FeatureType.VISUAL, (3, smolvla_toy.IMAGE_SIZE, smolvla_toy.IMAGE_SIZE))
    shape = {
        **smolvla_toy.POLICY_SETTINGS,
        "device": "cpu",
        "vlm_model_name": str(vlm),
        "input_features": {
            "observation.state": configs.PolicyFeature(configs.FeatureType.STATE, (2,)),
            smolvla_toy.CAMERA: image,
        },
        "output_features": {"action": configs.PolicyFeature(configs.FeatureType.ACTION, (2,))},
    }
    teacher, student = folder / "teacher", folder / "student"
    teacher.mkdir(parents=True)
    student.mkdir()
    configuration_smolvla.SmolVLAConfig(**shape).save_pretrained(teacher)
    save_file({"nothing": torch.zeros(1)}, teacher / "model.safetensors")  # never read
    reflow = {"use_reflow": True, "teacher_model_path": str(teacher), **fields}
    configuration_smolvla_reflow.SmolVLAReflowConfig(**{**shape, **reflow}).save_pretrained(student)
    return student


def _config_file(folder: Path, module: Any, flags: tuple[str, ...]) -> Path:
    return recipe_flags.write_options(folder / "config.yaml", recipe_flags.read_options(module.Options, "", flags))
