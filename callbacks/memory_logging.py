"""Memory in a Trainer's progress bar, log and experiment trackers, a run's cost in its output folder, and leaks."""

import importlib.util
import inspect
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hf_memopt.activations import ActivationOffloader
from hf_memopt.memory import Counters, LeakMonitor, LeakReport, MemoryTracker, explain_oom
from hf_memopt.memory.device_counters import device_name
from hf_memopt.memory.logger import (
    METRICS_FILE,
    WARN_AT,
    append_metrics,
    high_memory_message,
    largest_of_ranks,
    memory_metrics,
    short_figure,
)
from hf_memopt.report import read_run, write_report
from hf_memopt.report.offloading import OFFLOADING_FILE, OffloadingRecord, in_words
from hf_memopt.report.runs import TRAINER_FILE
from hf_memopt.report.tables import training_facts, training_section

logger = logging.getLogger(__name__)


class MemoryLoggingCallback(TrainerCallback):
    """Shows peak memory in the progress bar, logs it with the loss, and warns when it gets close to the limit.

    Every log that holds a loss has the figures of `hf_memopt.memory.memory_metrics`, in `state.log_history`, in every
    tracker of `report_to` and in `memory.jsonl` of the output folder; at level INFO a line tells step, time per batch,
    memory and remaining time. Of several ranks the largest figures count.

    The phases are `forward` (of the model), `backward` (from there to the optimizer, with losses outside of the model
    and clipping), `optimizer` and `evaluation`; with `torch_compile=True`, whose model must not be watched from inside,
    and under `DataParallel`, whose replicas run in threads, only `optimizer`. Training is bitwise the same. Nothing
    waits for the device.

    Args:
        warn_at: warn, once, when the peak reaches this share of the device memory that the process can have.
        reset_peaks: makes the peak of every phase exact by resetting the process's peak counters at each phase. Not
            with `skip_memory_metrics=False`, since Trainer reads the same counters then.
        counters: where to read device memory from; None, the device's own.

    Raises:
        ValueError: `warn_at` is no share; when training begins, `reset_peaks` meets `skip_memory_metrics=False`.
    """

    def __init__(self, *, warn_at: float = 0.85, reset_peaks: bool = False, counters: Counters | None = None) -> None:
        WARN_AT.check("warn_at", warn_at)
        self._warn_at: float | None = warn_at
        self._reset_peaks = reset_peaks
        self._counters = counters
        self._handler: CallbackHandler | None = None
        self._watch: _ModelWatch | None = None
        self._clock = _Clock()
        self.tracker: MemoryTracker | None = None

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        self._go_first()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *others: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        # May come twice without an end in between: auto_find_batch_size starts again, and an exception ends nothing.
        if self._reset_peaks and not args.skip_memory_metrics:
            raise ValueError(
                "reset_peaks=True would spoil the peaks that skip_memory_metrics=False makes Trainer measure; "
                "leave one of them at its default"
            )
        self._go_first()
        if state.global_step == 0 and state.is_world_process_zero:  # not of this run
            (Path(args.output_dir) / METRICS_FILE).unlink(missing_ok=True)
        if self.tracker is None:
            self.tracker = MemoryTracker(args.device, reset_peaks=self._reset_peaks, counters=self._counters)
        self.tracker.switch_to(None)
        self._stop_watching()
        if not args.torch_compile and args.n_gpu <= 1:
            self._watch = _ModelWatch(model, self.tracker)
        self._clock.start(state.global_step)

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._switch_to(None)
        self._clock.count_batch()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._switch_to("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._switch_to(None)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.tracker is not None
        self.tracker.step()
        self._clock.count_batch()
        for callback in [] if self._handler is None else self._handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.set_postfix_str(short_figure(self.tracker), refresh=False)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._switch_to(None)
        self._clock.leave_out()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self._clock.leave_out()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *others: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "loss" not in logs or self.tracker is None:
            return
        reading = self.tracker.read()
        metrics = largest_of_ranks(memory_metrics(self.tracker, reading))
        logs.update(metrics)
        # Trainer has copied the logs into its history already.
        state.log_history[-1].update(metrics)
        if state.is_world_process_zero:
            logger.info("%s", self._clock.line(state, short_figure(self.tracker)))
            append_metrics(Path(args.output_dir) / METRICS_FILE, state.global_step, metrics)
        if self._warn_at is not None and (message := high_memory_message(self.tracker, reading, self._warn_at)):
            logger.warning("%s", message)
            self._warn_at = None

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._stop_watching()

    def facts(self, args: TrainingArguments, state: TrainerState) -> dict[str, str] | None:
        """Return the cost of training in words, for a model card or a page, or None before anything was logged."""
        per_pass, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        ranks = f" on each of {args.world_size} devices" if args.world_size > 1 else ""
        return training_facts(
            state.log_history,
            device=device_name(args.device),
            update=f"{accumulation} x {per_pass} samples{ranks}",
            seconds_per_batch=self._clock.seconds_per_batch,
        )

    def _switch_to(self, phase: str | None) -> None:
        if self.tracker is not None:  # an evaluation before any training
            self.tracker.switch_to(phase)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _go_first(self) -> None:
        """Move to the front of the callbacks, before the loggers that are to see the figures."""
        self._handler = _calling_handler()
        if self._handler is None or self not in self._handler.callbacks:
            logger.warning("memory figures reach no experiment tracker: the list of callbacks was not found")
            return
        # Trainer is iterating over this list and has reached this callback. Those before it move by one place: none is
        # skipped, and none is called twice.
        self._handler.callbacks.remove(self)
        self._handler.callbacks.insert(0, self)


class MemoryPageCallback(TrainerCallback):
    """Writes `report/report.html` when training ends, and `trainer_state.json`, which has the losses."""

    def __init__(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("memory_report=True needs matplotlib, which the extra 'report' installs")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir)
        if state.is_world_process_zero and not (folder / METRICS_FILE).exists():
            logger.warning("no report: no memory was logged, with logging_steps=%s", args.logging_steps)
        elif state.is_world_process_zero:
            state.save_to_json(str(folder / TRAINER_FILE))
            logger.info("report: %s", write_report(read_run(folder), folder / "report"))


class _ModelWatch:
    def __init__(self, model: nn.Module | None, tracker: MemoryTracker | None) -> None:
        self._tracker = tracker
        self._handles: list[Any] = []
        if model is not None:
            self._handles.append(model.register_forward_pre_hook(self._begin_forward, prepend=True))
            self._handles.append(model.register_forward_hook(self._end_forward))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        # Copies and pickles of the model carry its hooks, and are not to be watched.
        return _ModelWatch, (None, None)

    def _begin_forward(self, model: nn.Module, inputs: Any) -> None:
        if self._tracker is not None:
            self._tracker.switch_to("forward" if model.training else "evaluation")

    def _end_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._tracker is not None and model.training:
            self._tracker.switch_to("backward")


class _Clock:
    """Seconds per batch since the last log, evaluations and saves left out, and the time that remains."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, step: int) -> None:
        self._first_step = step
        self._begun = self._since = time.monotonic()
        self._seconds, self._num_batches = 0.0, 0
        self._logged = 0.0, 0  # these two at the last log

    @property
    def seconds_per_batch(self) -> float:
        return self._seconds / max(1, self._num_batches)

    def count_batch(self) -> None:
        self._seconds += time.monotonic() - self._since
        self._num_batches += 1
        self.leave_out()

    def leave_out(self) -> None:
        self._since = time.monotonic()

    def line(self, state: TrainerState, memory: str) -> str:
        """Return the line, and begin the next interval."""
        seconds, num_batches = self._logged
        per_batch = (self._seconds - seconds) / max(1, self._num_batches - num_batches)
        self._logged = self._seconds, self._num_batches
        done = max(1, state.global_step - self._first_step)
        remaining = (time.monotonic() - self._begun) / done * (state.max_steps - state.global_step)
        clock = f"{remaining // 3600:02.0f}:{remaining // 60 % 60:02.0f}:{remaining % 60:02.0f}"
        return f"step {state.global_step}/{state.max_steps} | {per_batch:.1f}s/batch | {memory} | ETA: {clock}"


def _calling_handler() -> CallbackHandler | None:
    """Find the handler that is calling a callback on the stack: Trainer does not pass it."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back
    return None


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
        if facts is None or not self._trainer.is_world_process_zero():
            return
        facts["activation offloading"] = "off"
        if self._offloader is not None:
            facts["activation offloading"] = "; ".join(in_words(self._offloader.stats_at_peak))
            if plans := self._offloader.report().plans:
                facts["plan"] = "; ".join(each.plan.summary() for each in plans)
        with (Path(self._trainer.args.output_dir) / "README.md").open("a", encoding="utf-8") as card:
            card.write(f"\n\n{training_section(facts)}\n")


class LeakDetectionCallback(TrainerCallback):
    """Says, once, that memory stays behind at every optimizer step, with the tensors and their holders.

    Looks between optimizer steps, when gradients are gone, and counts anew whenever training begins or resumes. Memory
    left by evaluation, saving or an epoch is no leak of the step. Each rank watches itself.

    Args:
        options: of `hf_memopt.memory.LeakMonitor`, which states the cost: `every_n_steps` (None: at most 1 % of the
            time), `min_bytes_per_step`, `action` ("warn" or "raise").

    Raises:
        ValueError: an option is out of range.
        MemoryLeakError: during training, with `action="raise"`.

    Example:
        >>> Trainer(..., callbacks=[LeakDetectionCallback()])
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._monitor = LeakMonitor(**options)

    def report(self) -> LeakReport | None:
        """Return the report on this run, or None while there is no verdict."""
        return self._monitor.report()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        # May come twice without an end in between: auto_find_batch_size starts over, and an exception ends nothing.
        self._monitor = LeakMonitor(**self._options)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._monitor.step()
