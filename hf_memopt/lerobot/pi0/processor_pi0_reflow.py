"""The student's processors are π0's; lerobot finds this factory by its name."""

from typing import Any

from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors

from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig


def make_pi0_reflow_pre_post_processors(
    config: PI0ReflowConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> tuple[Any, Any]:
    processors: tuple[Any, Any] = make_pi0_pre_post_processors(config, dataset_stats=dataset_stats)
    return processors
