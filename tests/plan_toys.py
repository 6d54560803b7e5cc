"""The workload of every recipe at a size that a CPU trains at once."""

from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lgt_toys import TINY
from safetensors.torch import save_file

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.recipes.causal_lm import plan as causal_lm_plan
from hf_memopt.recipes.common.auto_plan import RecipeWorkload
from hf_memopt.recipes.fluxflow import plan as fluxflow_plan
from hf_memopt.recipes.lgt import plan as lgt_plan
from hf_memopt.recipes.lgt.config import read_config
from hf_memopt.recipes.neural_operator import plan as neural_operator_plan
from hf_memopt.recipes.reflow import plan as reflow_smolvla_plan
from hf_memopt.recipes.reflow.smolvla_toy import CAMERA, IMAGE_SIZE, POLICY_SETTINGS

ROOT = Path(__file__).parent.parent
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


def causal_lm(folder: Path, *flags: str, **options: Any) -> RecipeWorkload:
    return causal_lm_plan.workload(_flags_file(folder, CAUSAL_LM + flags), **options)


def fluxflow(folder: Path, *flags: str, **options: Any) -> RecipeWorkload:
    return fluxflow_plan.workload(_flags_file(folder, FLUXFLOW + flags), **options)


def lgt(folder: Path, *flags: str, **options: Any) -> RecipeWorkload:
    return lgt_plan.LatentTransferWorkload(lgt_config(*flags), **options)


def neural_operator(folder: Path, *flags: str, **options: Any) -> RecipeWorkload:
    return neural_operator_plan.workload(_flags_file(folder, NEURAL_OPERATOR + flags), **options)


def lgt_config(*flags: str) -> Any:
    return read_config("", [*(f"--{name}={value}" for name, value in TINY.items()), *flags])


def smolvla(folder: Path, vlm: Path, options: dict[str, Any] | None = None, **fields: Any) -> RecipeWorkload:
    return reflow_smolvla_plan.workload(write_student(folder, vlm, **fields), **(options or {}))


def write_student(folder: Path, vlm: Path, **fields: Any) -> Path:
    """The configurations of a teacher and its student, without weights; returns the student's folder."""
    image = PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIZE, IMAGE_SIZE))
    shape = {
        **POLICY_SETTINGS,
        "device": "cpu",
        "vlm_model_name": str(vlm),
        "input_features": {"observation.state": PolicyFeature(FeatureType.STATE, (2,)), CAMERA: image},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))},
    }
    teacher, student = folder / "teacher", folder / "student"
    teacher.mkdir(parents=True)
    student.mkdir()
    SmolVLAConfig(**shape).save_pretrained(teacher)
    save_file({"nothing": torch.zeros(1)}, teacher / "model.safetensors")  # never read
    reflow = {"use_reflow": True, "teacher_model_path": str(teacher), **fields}
    SmolVLAReflowConfig(**{**shape, **reflow}).save_pretrained(student)
    return student


def _flags_file(folder: Path, flags: tuple[str, ...]) -> Path:
    path = folder / "flags.args"
    path.write_text("".join(f"{flag}\n" for flag in flags), encoding="utf-8")
    return path
