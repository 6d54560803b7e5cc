"""Leak detection as a Trainer callback."""

from typing import Any

from transformers import TrainerCallback

from hf_memopt.memory import LeakMonitor, LeakReport


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
        """Return the report on this run; None while there is no verdict."""
        return self._monitor.report()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        # May come twice without an end in between: auto_find_batch_size starts over, and an exception ends nothing.
        self._monitor = LeakMonitor(**self._options)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._monitor.step()
