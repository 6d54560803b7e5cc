"""The students' processors are π0's and π0.5's; lerobot finds these factories by their names."""

from typing import Any

from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig, PI05ReflowConfig

Statistics = dict[str, dict[str, Any]] | None


def make_pi0_reflow_pre_post_processors(config: PI0ReflowConfig, dataset_stats: Statistics = None) -> tuple[Any, Any]:
    processors: tuple[Any, Any] = make_pi0_pre_post_processors(config, dataset_stats=dataset_stats)
    return processors


def make_pi05_reflow_pre_post_processors(config: PI05ReflowConfig, dataset_stats: Statistics = None) -> tuple[Any, Any]:
    processors: tuple[Any, Any] = make_pi05_pre_post_processors(config, dataset_stats=dataset_stats)
    return processors
