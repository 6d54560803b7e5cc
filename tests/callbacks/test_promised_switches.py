"""Every trainer and every flag that docs/trainer.md promises: the plain run's weights, and bytes that have moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

from hf_memopt.activations.checkpointing.selective import CheckpointedForward
from hf_memopt.weights.base import streamed_weights_of

frozen_models = LateModule("hf_memopt.callbacks.frozen_models")
callbacks = LateModule("hf_memopt.callbacks")
every_trainer = LateModule("hf_memopt.callbacks.every_trainer")
frozen_trainers = LateModule("frozen_trainers")
sentences = LateModule("sentence_toys")
sentence_losses = LateModule("sentence_transformers.sentence_transformer.losses")
trl_trainers = LateModule("trl_trainers")

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")


def embeddings(folder: Path, lora: bool = False, **options: Any) -> Any:
    model = sentences.make_model(folder, 0.1)
    if lora:
        model.add_adapter(frozen_trainers.peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=4))
    loss = sentence_losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    return sentences.make_trainer(folder, model, loss, sentences.rows(False), **options)


TRAINERS: dict[str, Callable[..., Any]] = {
    "Trainer": lambda *args, **options: trl_trainers.plain(*args, max_steps=3, **options),
    "Seq2SeqTrainer": lambda *args, **options: trl_trainers.seq2seq(*args, max_steps=3, **options),
    "SFTTrainer": lambda *args, **options: trl_trainers.sft(*args, max_steps=3, **options),
    "ORPOTrainer": lambda *args, **options: trl_trainers.orpo(*args, max_steps=3, **options),
    "RewardTrainer": lambda *args, **options: trl_trainers.reward(*args, max_steps=3, **options),
    "DPOTrainer": lambda *args, **options: frozen_trainers.dpo(*args, **options),
    "KTOTrainer": lambda *args, **options: frozen_trainers.kto(*args, **options),
    "GRPOTrainer": lambda *args, **options: frozen_trainers.grpo(*args, **options),
    "RLOOTrainer": lambda *args, **options: frozen_trainers.rloo(*args, **options),
    "GKDTrainer": lambda *args, **options: frozen_trainers.gkd(*args, **options),
    "GOLDTrainer": lambda *args, **options: frozen_trainers.gold(*args, **options),
    "SentenceTransformerTrainer": embeddings,
}
FROZEN = ["DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "GKDTrainer", "GOLDTrainer"]


@dataclass
class Run:
    trainer: Any
    offloaders: list[Any]


@dataclass
class Switch:
    """A flag with its value; `done` tells from a run how many bytes it has moved, or things it has made."""

    flags: dict[str, Any]
    done: Callable[[Run], int]
    options: dict[str, Any]
    trainers: Sequence[str] = tuple(TRAINERS)


def moved(run: Run) -> int:
    return sum(offloader.stats.bytes_moved for offloader in run.offloaders)


def written(run: Run) -> int:
    return sum(offloader.stats.disk_bytes_written for offloader in run.offloaders)


def streamed(run: Run) -> int:
    report = streamed_weights_of(run.trainer.model).report()  # type: ignore[union-attr]
    return report.bytes_read + report.bytes_to_device


def trained(run: Run) -> int:
    report = streamed_weights_of(run.trainer.model).report()  # type: ignore[union-attr]
    return min(report.bytes_to_home, report.gradient_bytes[1], updated(run))


def visited(run: Run) -> int:
    (part,) = (each for each in run.trainer.callback_handler.callbacks if isinstance(each, frozen_models.FrozenModels))
    reports = [visits.teacher.report() for visits in part.visits.values()]
    return min(report.bytes_host_to_device + report.bytes_read for report in reports)


def updated(run: Run) -> int:
    report = run.trainer.optimizer.optimizer.report()
    return min(report.bytes_read, report.bytes_written)


def checkpointed(run: Run) -> int:
    return sum(isinstance(vars(each).get("forward"), CheckpointedForward) for each in run.trainer.model.modules())


def logged(run: Run) -> int:
    return sum("memory/host_rss_gib" in entry for entry in run.trainer.state.log_history)


def watched(run: Run) -> int:
    return sum(isinstance(each, callbacks.LeakDetectionCallback) for each in run.trainer.callback_handler.callbacks)


def reported(run: Run) -> int:
    return len((Path(run.trainer.args.output_dir) / "report" / "report.html").read_text())


NO_CHECKPOINTS = {"gradient_checkpointing": False}
ADAPTERS = {"lora": True}
WITH_ADAPTERS = [name for name in TRAINERS if name not in ("GKDTrainer", "GOLDTrainer")]

SWITCHES = {
    "offload=all": Switch({"offload": "all", "cpu_copies": True}, moved, NO_CHECKPOINTS),
    "offload=auto": Switch({"offload": "auto", "cpu_copies": True}, moved, NO_CHECKPOINTS),
    "offload=inputs": Switch({"offload": "inputs", "cpu_copies": True}, moved, {"gradient_checkpointing": True}),
    "disk": Switch({"offload": "all", "disk": "."}, written, NO_CHECKPOINTS),
    "selective_checkpointing": Switch({"selective_checkpointing": True}, checkpointed, NO_CHECKPOINTS),
    "base=host": Switch({"base": "host"}, streamed, ADAPTERS, WITH_ADAPTERS),
    "base=file": Switch({"base": "file"}, streamed, ADAPTERS, WITH_ADAPTERS),
    "trained": Switch({"base": "file", "trained": True}, trained, {"optim": "adamw_torch"}),
    "frozen=swap": Switch({"frozen": "swap"}, visited, {}, FROZEN),
    "frozen=stream": Switch({"frozen": "stream"}, visited, {}, FROZEN),
    "frozen_home=file": Switch({"frozen": "stream", "frozen_home": "file"}, visited, {}, FROZEN),
    "optimizer_home": Switch({"optimizer_home": "file"}, updated, {"optim": "adamw_torch"}),
    "memory_log": Switch({"memory_log": True}, logged, {}),
    "leak_check": Switch({"leak_check": True}, watched, {}),
    "memory_report": Switch({"memory_log": True, "memory_report": True}, reported, {}),
}
CASES = [
    pytest.param(trainer, switch, id=f"{trainer}-{switch}")
    for switch, about in SWITCHES.items()
    for trainer in about.trainers
]


def weights_after(trainer: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)  # for random completions
    trainer.train()
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.sweep(share=1 / 15)
@pytest.mark.parametrize(("trainer", "switch"), CASES)
def test_a_switch_does_what_it_names_and_changes_no_bit(
    trainer: str, switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    about = SWITCHES[switch]
    options = {"logging_steps": 1, **about.options}
    want = weights_after(TRAINERS[trainer](tmp_path, **options))
    flags = {"offload": "off", "memory_log": False, "offload_threshold_mb": 0.0, **about.flags}
    with every_trainer.attached(callbacks.MemoptArguments(**flags)) as attached:
        made = TRAINERS[trainer](tmp_path, **options)
        found = weights_after(made)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert about.done(Run(made, list(attached.offloaders))) > 0


def test_every_flag_is_in_the_table() -> None:
    """Check all fields but those that only tune another one, and `fit`, whose effects tests of their own show."""
    tuning = {
        *("prefetch_ahead", "pin_memory", "budget_gib", "max_slowdown", "host_budget_gib", "offload_threshold_mb"),
        *("disk_budget_gib", "skip", "base_budget_gib", "optimizer_budget_gib", "memory_gib", "max_waiting"),
    }
    in_table = {name for switch in SWITCHES.values() for name in switch.flags}
    assert set(vars(callbacks.MemoptArguments())) == in_table | tuning | {"fit"}
