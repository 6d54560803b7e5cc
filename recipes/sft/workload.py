"""Plans for `train_sft.py`: its trainer, simulated."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from accelerate import PartialState

from hf_memopt.planning import Job, Row
from hf_memopt.planning.models.accelerate_config import write_accelerate_config
from hf_memopt.planning.workloads.argument_file import ArgumentFile, current_names, set_fields
from hf_memopt.planning.workloads.trainer_workload import TrainerWorkload
from hf_memopt.planning.workloads.trl_trainers import TRL
from hf_memopt.recipes.common.auto_plan import best_row
from hf_memopt.recipes.common.shipped_configs import config_file
from hf_memopt.recipes.sft.model import write_tiny_model
from hf_memopt.recipes.sft.options import Options, parse
from hf_memopt.text_files import read_values

__all__ = ["workload"]

_TINY_MODELS: list[TemporaryDirectory[str]] = []
# Fields that a plan chooses; the rest of a file stays.
_CHOSEN = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")


def workload(
    config_path: str | Path, *, precision: str | None = None, effective_batch: int | None = None
) -> "SupervisedFineTuning":
    """Return the workload of a configuration file, as for `train_sft.py --config FILE`.

    `precision` is "no", "bf16" or "fp16"; `effective_batch` counts conversations per update; None, as in the file.
    """
    file = config_file("config", Path(config_path))
    options = parse("", ["--config", str(file)])
    if options.model.model_name_or_path is None:
        _TINY_MODELS.append(TemporaryDirectory())  # its configuration is read while the plan is made
        options.model.model_name_or_path = write_tiny_model(Path(_TINY_MODELS[-1].name), options.training.seed)
    return SupervisedFineTuning(options, read_values(file), precision=precision, effective_batch=effective_batch)


def apply_plan(options: Options) -> Row | None:
    """Change the flags to the choice of a plan for `--plan`'s card; return its prediction. Without it, do nothing."""
    if options.sft.plan is None:
        return None
    simulated = SupervisedFineTuning(options, {})
    best = best_row(simulated, options.sft.plan, PartialState())
    run = simulated.chosen(best.settings, best.micro_batch)
    options.memopt.offload = run.options.offload  # type: ignore[assignment]
    options.memopt.selective_checkpointing = run.options.checkpointing == "selective"
    set_fields(options.training, {name: run.changes[name] for name in _CHOSEN})
    return best


class SupervisedFineTuning(TrainerWorkload):
    """The run of the recipe's flags, with `max_length` tokens in each conversation; `given` is its file."""

    def __init__(self, options: Options, given: Mapping[str, Any], **changes: Any) -> None:
        self._given_fields = given
        memopt = options.memopt
        own: dict[str, Any] = {
            "base": "host" if memopt.base == "auto" else memopt.base,
            "base_budget": None if memopt.base_budget_gib is None else f"{memopt.base_budget_gib}GiB",
            "trained": memopt.trained,
            "optimizer_home": memopt.optimizer_home,
            "checkpointing": "selective" if memopt.selective_checkpointing else None,
            "offload": memopt.offload,
            "quantize": options.sft.quantize,
            "adapters_dtype": options.sft.adapters_dtype,
            "freeze_layers": options.sft.freeze_layers,
        }
        fields = {**_given(options.training), **vars(options.model)}
        file = ArgumentFile(None, current_names(fields), TRL["sft"])
        super().__init__(Job(trainer="sft", **own, **changes), file, memopt.offload_threshold_mb)

    def write(self, settings: Mapping[str, Any], micro_batch: int, folder: Path) -> list[Path]:
        run = self.chosen(settings, micro_batch)
        # The plan takes their place.
        kept = {name: value for name, value in self._given_fields.items() if name not in ("plan", "budget_gib")}
        chosen = {name: run.changes[name] for name in _CHOSEN}
        chosen |= {"bf16": bool(run.settings.bf16), "fp16": bool(run.settings.fp16), "offload": run.options.offload}
        chosen["selective_checkpointing"] = run.options.checkpointing == "selective"
        (folder / "sft.yaml").write_text(
            yaml.safe_dump(current_names(kept) | current_names(chosen), sort_keys=False), encoding="utf-8"
        )
        return [write_accelerate_config(folder / "accelerate.yaml", run.options.precision), folder / "sft.yaml"]

    def command(self, written: list[Path]) -> str:
        config, fields = written
        return f"accelerate launch --config_file {config} -m hf_memopt.recipes.train_sft --config {fields}"


def _given(training: Any) -> dict[str, Any]:
    """Return the settings that are no defaults."""
    defaults = type(training)()
    differing = {name: value for name, value in vars(training).items() if value != getattr(defaults, name, None)}
    return {name: value for name, value in differing.items() if name in training.__dataclass_fields__}
