"""lerobot's training of a policy as a workload: its own update, simulated, and its own command."""

import copy
import shlex
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.policies import get_policy_class

from hf_memopt.planning.job import Job
from hf_memopt.planning.models.accelerate_config import write_accelerate_config
from hf_memopt.planning.models.model_config import training
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.workload import Lever, Settings, num_steps
from hf_memopt.planning.workloads.model_levers import ACTIVATIONS, ADAPTIVE
from hf_memopt.planning.workloads.policy_run import DATASET, autocast, training_config
from hf_memopt.planning.workloads.policy_update import set_up, update
from hf_memopt.planning.workloads.robot_policies import PolicyFile

_SCRIPT = "lerobot.scripts.lerobot_train"


class PolicyTraining:
    """Trains as `lerobot-train` does, with the batch, the adapters and the frozen parts of its configuration.

    lerobot 0.6.1 updates after each batch, so `micro_batches` has no other size.
    """

    tokens_per_sample: int | None = None
    packages = ("hf_memopt[lerobot]",)

    def __init__(self, spec: Job, file: PolicyFile) -> None:
        self.cfg = cfg = training_config(spec, file)
        self._precision = autocast(cfg.policy, spec.precision)
        self._num_tokens = num_tokens = spec.seq_len
        longest = getattr(cfg.policy, "tokenizer_max_length", None)
        if num_tokens is not None and (longest is None or num_tokens > longest):
            raise ValueError(
                f"seq_len={num_tokens}: policy type {cfg.policy.type!r} reads "
                + ("no instructions" if longest is None else f"at most tokenizer_max_length={longest} tokens")
            )
        self.model, self._offload = str(spec.model), spec.offload or "off"
        get_policy_class(cfg.policy.type)  # imported before processes are forked
        self.micro_batch = self.effective_batch = int(cfg.batch_size)
        self.micro_batches = [self.micro_batch]
        checkpoints = hasattr(cfg.policy, "gradient_checkpointing")
        kinds = ("none", "full") if checkpoints else ("none",)
        names = (name for name, (kind, _) in ACTIVATIONS.items() if kind in kinds)
        self.levers = (Lever("activations", tuple(names), adaptive=ADAPTIVE),)

    @property
    def name(self) -> str:
        return f"{self.model} as {_title(self.cfg)}, batches of {self.cfg.batch_size}, in lerobot"

    def as_given(self) -> SimulatedStep:
        checkpoints, offload = getattr(self.cfg.policy, "gradient_checkpointing", False), self._offload
        if offload == "inputs" and not checkpoints:
            raise ValueError(
                "offload='inputs' moves the inputs of checkpointed blocks; use checkpointing='full' where there is one"
            )
        return self._step(self.cfg, offload)

    def simulated(self, settings: Settings, micro_batch: int) -> SimulatedStep:
        checkpointing, offload = ACTIVATIONS[settings["activations"]]
        return self._step(self._with(checkpointing), offload)

    def write(self, settings: Settings, micro_batch: int, folder: Path) -> list[Path]:
        checkpointing, self._offload = ACTIVATIONS[settings["activations"]]
        folder.mkdir(parents=True, exist_ok=True)
        self._with(checkpointing).save_pretrained(folder)
        config = write_accelerate_config(folder / "accelerate.yaml", self._precision)
        return [config, folder / "train_config.json"]

    def command(self, written: list[Path]) -> str:
        """Return lerobot's script with the file, under `hf-memopt launch` where it offloads.

        Data that a policy's configuration does not name stay for the user to name.
        """
        config, run = (shlex.quote(str(path)) for path in written)
        data = f" --dataset.repo_id={DATASET}" if self.cfg.dataset.repo_id == DATASET else ""
        script = f"-m {_SCRIPT} --config_path={run}{data}"
        if self._offload == "off":
            return f"accelerate launch --config_file {config} {script}"
        return f"hf-memopt launch --config_file {config} --offload {self._offload} -- {script}"

    def _with(self, checkpointing: str) -> TrainPipelineConfig:
        cfg = copy.deepcopy(self.cfg)
        if hasattr(cfg.policy, "gradient_checkpointing"):
            cfg.policy.gradient_checkpointing = checkpointing == "full"
        return cfg

    def _step(self, cfg: TrainPipelineConfig, offload: str) -> SimulatedStep:
        refused = training(f"model={self.model!r}")
        return SimulatedStep(
            setup=refused(lambda device: set_up(cfg, self._precision, offload, self._num_tokens)),
            step=refused(update),
            num_steps=num_steps(offload, 1),
            is_trainers_own=True,
        )


def _title(cfg: TrainPipelineConfig) -> str:
    policy: Any = cfg.policy
    sizes = [f"{height}x{width}" for _, height, width in (each.shape for each in policy.image_features.values())]
    cameras = (
        f"{len(sizes)} cameras of {', '.join(dict.fromkeys(sizes))}" if len(sizes) > 1 else f"a camera of {sizes[0]}"
    )
    return f"{policy.type} with {cameras}, {_trained(policy, cfg.peft)}"


def _trained(policy: PreTrainedConfig, peft: Any) -> str:
    if peft is not None:
        return f"{peft.method_type.replace('LORA', 'LoRA')} of rank {peft.r}"
    if getattr(policy, "train_expert_only", False):
        return "the expert trained"
    return "all but the vision encoder trained" if getattr(policy, "freeze_vision_encoder", False) else "all trained"
