"""Policy types `pi0_reflow` and `pi05_reflow`: students that learn straight paths from a teacher's couplings."""

from pathlib import Path
from typing import Any, Self

from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05.modeling_pi05 import PI05Policy

from hf_memopt.lerobot.files.policy_files import check_weights_file, load_config, resolve_checkpoint
from hf_memopt.lerobot.flow.pi0_flow import load_pi0_weights
from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig, PI05ReflowConfig
from hf_memopt.lerobot.reflow.reflow_policy import ReflowPolicy


class _StrictlyLoaded(ReflowPolicy):
    @classmethod
    def from_pretrained(
        cls,
        pretrained_name_or_path: str | Path,
        *,
        config: PI0ReflowConfig | PI05ReflowConfig | None = None,
        revision: str | None = None,
        strict: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load strictly for any value of `strict`: lerobot's own method goes on with random values after a misfit."""
        folder = resolve_checkpoint(pretrained_name_or_path, revision)
        check_weights_file(folder)
        policy = cls(load_config(folder) if config is None else config, **kwargs)
        load_pi0_weights(policy, folder)
        return policy.eval()


class PI0ReflowPolicy(_StrictlyLoaded, PI0Policy):
    config_class = PI0ReflowConfig
    name = "pi0_reflow"


class PI05ReflowPolicy(_StrictlyLoaded, PI05Policy):
    config_class = PI05ReflowConfig
    name = "pi05_reflow"
