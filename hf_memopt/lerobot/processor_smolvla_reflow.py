"""The student's processors are SmolVLA's; lerobot finds this factory by its name."""

from typing import Any

from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig


def make_smolvla_reflow_pre_post_processors(
    config: SmolVLAReflowConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> tuple[Any, Any]:
    processors: tuple[Any, Any] = make_smolvla_pre_post_processors(config, dataset_stats=dataset_stats)
    return processors
