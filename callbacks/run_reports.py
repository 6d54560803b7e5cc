"""A training run's cost in its output folder: `offloading.json`, model cards, and out-of-memory reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.activations import ActivationOffloader
from hf_memopt.callbacks.memory_logging import MemoryLoggingCallback
from hf_memopt.memory import explain_oom
from hf_memopt.report.offloading import OFFLOADING_FILE, OffloadingRecord, in_words
from hf_memopt.report.tables import training_section


class RunReports(TrainerCallback):
    """Reports the memory and time of a trainer's run, with the `MemoryLoggingCallback` that it has or gets.

    `lines_about_weights` is called at the end, for weights and optimizer state that lived elsewhere.
    """

    def __init__(
        self,
        trainer: Trainer,
        offloader: ActivationOffloader | None,
        lines_about_weights: Callable[[], list[str]],
    ) -> None:
        self._trainer, self._offloader = trainer, offloader
        self._lines_about_weights = lines_about_weights
        callbacks = trainer.callback_handler.callbacks
        found = next((each for each in callbacks if isinstance(each, MemoryLoggingCallback)), None)
        self._added, self._logging = found is None, found or MemoryLoggingCallback()
        if self._added:
            trainer.add_callback(self._logging)
        trainer.add_callback(self)
        # Callbacks see no exceptions, and no cards.
        self._plain_train, self._plain_card = trainer.train, trainer.create_model_card
        trainer.train, trainer.create_model_card = self._train, self._create_model_card

    def remove(self) -> None:
        del self._trainer.train, self._trainer.create_model_card
        self._trainer.remove_callback(self)
        if self._added:
            self._trainer.remove_callback(self._logging)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 0 and state.is_world_process_zero:  # not of this run
            (Path(args.output_dir) / OFFLOADING_FILE).unlink(missing_ok=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        facts = self._logging.facts(args, state)
        if facts is None or not state.is_world_process_zero:
            return
        record = OffloadingRecord.of(self._offloader, facts=facts, weights=self._lines_about_weights())
        record.write(Path(args.output_dir))

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        with explain_oom(self._trainer.model, output_dir=self._trainer.args.output_dir):
            return self._plain_train(*args, **kwargs)

    def _create_model_card(self, *args: Any, **kwargs: Any) -> None:
        self._plain_card(*args, **kwargs)
        facts = self._logging.facts(self._trainer.args, self._trainer.state)
        if facts is not None and self._trainer.is_world_process_zero():
            section = training_section(facts | self._about_offloading())
            with (Path(self._trainer.args.output_dir) / "README.md").open("a", encoding="utf-8") as card:
                card.write(f"\n\n{section}\n")

    def _about_offloading(self) -> dict[str, str]:
        if self._offloader is None:
            return {"activation offloading": "off"}
        plans = "; ".join(each.plan.summary() for each in self._offloader.report().plans)
        done = {"activation offloading": "; ".join(in_words(self._offloader.stats_at_peak))}
        return done | {"plan": plans} if plans else done
