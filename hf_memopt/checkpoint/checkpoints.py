"""Checkpoints of a training run on Accelerate: atomic, verified, and saved before the process is told to go."""

import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import SCALER_NAME, DistributedType, gather_object, load
from torch.distributed.fsdp import StateDictType

from hf_memopt.checkpoint import files
from hf_memopt.checkpoint.states import check_pickles, check_random_states, weights_only
from hf_memopt.disk.files_on_disk import lock_of, sync
from hf_memopt.ranges import Range

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Checkpoints:
    """Saves and resumes all that `accelerator.save_state` knows, in `folder/step-000120/` and so on.

    Accelerate writes models, optimizers, schedulers, the loss scaler, random number generators and objects given to
    `register_for_checkpointing`. Added here: a checkpoint is under its name, and named by the file `latest`, only when
    all of its files are on disk; a manifest with the sha256 of each, without which nothing is loaded; files that have
    the mode that the umask gives; the position in the data; and the end of the run at SIGTERM and SIGINT. No code that
    a checkpoint names is ever run: states are tensors, numbers, strings, lists, tuples and dicts.

    All ranks call `save`, `resume`, `stopping_on_signal` and `stop_requested` together. A failure on one rank raises on
    all: there the error itself, elsewhere a RuntimeError that names it. All nodes have to see the same `folder`, which
    one run at a time has: from `resume` or `stopping_on_signal` on, at the latest from the first save.

    Args:
        accelerator: everything has to be prepared and registered before the first call.
        folder: folder of this run alone; made when it is needed.
        keep_last: how many checkpoints to keep. Older ones go when a new one is complete.
        safe_serialization: write weights as safetensors; False where a model's state dict holds more than tensors.

    Raises:
        ValueError: `keep_last` is less than 1, or the accelerator uses DeepSpeed, Megatron-LM or FSDP1, whose loaders
            unpickle any class that a file names, or FSDP2 without `state_dict_type="SHARDED_STATE_DICT"`, its default.

    Example:
        >>> checkpoints = Checkpoints(accelerator, "outputs/checkpoints")
        >>> step = checkpoints.resume("latest")["step"] if checkpoints.has_latest else 0
        >>> with checkpoints.stopping_on_signal():
        ...     for batch in endless_batches(accelerator, loader, step):
        ...         ...  # one update
        ...         step += 1
        ...         stop = checkpoints.stop_requested()
        ...         if stop or step % 100 == 0:
        ...             checkpoints.save(step, {"step": step})
        ...         if stop:
        ...             break
    """

    def __init__(
        self, accelerator: Accelerator, folder: str | Path, keep_last: int = 2, *, safe_serialization: bool = True
    ) -> None:
        Range(at_least=1, whole=True, why=": the newest checkpoint always stays").check("keep_last", keep_last)
        _check_engine(accelerator)
        self.folder = Path(folder)
        self._accelerator = accelerator
        self._keep_last = keep_last
        self._safe_serialization = safe_serialization
        self._newest: tuple[int, Path] | None = None
        self._lock = lock_of(self.folder)
        self._run = uuid.uuid4().hex
        self._ours: set[str] = set()  # names in `folder` that this object saved, began to save, or resumed
        self._signals = StopSignals()
        self._agreed_signal = 0

    @property
    def has_latest(self) -> bool:
        """Return whether there is a checkpoint to resume from, valid or not."""
        return os.path.lexists(self.folder / files.LATEST)

    def save(self, step: int, position: dict[str, Any]) -> Path:
        """Save the state after `step` updates, unless it is saved already, and return the checkpoint's folder.

        Costs the time to write the state, to wait for the disk, and to read it once more for the manifest.

        Args:
            step: names the folder.
            position: the main process's value for `resume` to return, as JSON can hold it: epoch, batch, figures so
                far.

        Raises:
            ValueError: `step` is negative, `position` is nothing for JSON, it is the middle of an accumulation window
                (gradients are not saved), a registered object's state is more than tensors and plain values, `folder`
                holds checkpoints that this run neither saved nor resumed from, or another process is writing there.
            OSError: a file could not be written: says which, and how many bytes are free and needed. `latest` names a
                valid checkpoint all the same, mostly the one before.
        """
        if self._newest is not None and self._newest[0] == step:
            return self._newest[1]
        checkpoint = self.folder / files.checkpoint_name(step)
        draft = files.draft_of(checkpoint)
        with self._together():
            self._check_saving(step, position)
            self._claim()
            if self._accelerator.is_main_process:
                with files.writing(draft):
                    files.begin(draft)
        self._ours.add(checkpoint.name)
        try:
            with self._together(), files.writing(draft):
                self._accelerator.save_state(str(draft), safe_serialization=self._safe_serialization)
            with self._together(), files.writing(draft):
                files.sync_files(draft)
            with self._together():
                if self._accelerator.is_main_process:
                    check_pickles(draft)
                    as_read = json.loads(json.dumps(position))
                    header = {"step": step, "run": self._run, "position": as_read, "launch": self._launch()}
                    with files.writing(draft):
                        files.publish(draft, header, checkpoint)
        except Exception:
            if self._accelerator.is_main_process and draft.is_dir():
                shutil.rmtree(draft)
            raise
        self._newest = step, checkpoint
        with self._together():
            if self._accelerator.is_main_process:
                files.remove(files.older_than(self.folder, step, self._keep_last))
        return checkpoint

    def resume(self, name: str | Path) -> dict[str, Any]:
        """Verify a checkpoint, load it, and return the `position` that it was saved with.

        Nothing is loaded of a checkpoint that is not as it was saved, and no other one is taken in its place. One from
        this run's `folder` becomes `latest`; newer ones are overwritten when training gets there again. A folder that
        cannot be written to will do while its `latest` stays as it is.

        Args:
            name: "latest", a path, or the name of a checkpoint in `folder`.

        Raises:
            ValueError: there is no such checkpoint; a file is missing, damaged or not part of it (it names the file,
                and the checkpoints that are valid); `folder` holds checkpoints and this is none of them; another
                process is writing in `folder`; a state is more than tensors and plain values; random states cannot be
                set here; or it was saved by another number of processes, on another kind of device or in another
                precision, where training would not go on as it would have.
            OSError: `latest` could not be written.
        """
        with self._together():
            if self._accelerator.is_main_process:
                if os.access(self.folder, os.W_OK):
                    self._lock.acquire()
                found, manifest = files.verified(self.folder, name)
                check_pickles(found)
            else:  # one rank reads all files
                found = files.find_checkpoint(self.folder, name)
                manifest = files.read_manifest(found)
            self._check_launch(found, manifest["launch"])
            check_random_states(found, self._accelerator.process_index, self._accelerator.device)
        is_own = files.is_own(self.folder, found)
        with self._together():
            if is_own and self._accelerator.is_main_process:
                with files.writing(self.folder / files.LATEST):
                    files.point_latest_to(found)
        with self._together(), weights_only():
            self._accelerator.load_state(str(found))
            if self._accelerator.is_fsdp2 and self._accelerator.scaler is not None:
                # Loading the optimizer made a step without gradients, which the loss scaler has counted.
                self._accelerator.scaler.load_state_dict(load(found / SCALER_NAME))
        if is_own:
            self._newest, self._run = (manifest["step"], found), manifest["run"]
            self._ours.add(found.name)
        return manifest["position"]  # type: ignore[no-any-return]

    @contextmanager
    def stopping_on_signal(self) -> Iterator[None]:
        """Around the training loop: SIGTERM and SIGINT make `stop_requested` true instead of ending the process.

        A loop left for that reason ends the process with the usual status, 143 or 130. A SIGINT after that interrupts
        at once. A signal that no `stop_requested` has answered counts when the loop is over.

        Raises:
            ValueError: at the beginning, as from `save`: the folder is another run's or another process's.
            SystemExit: at the end, on all ranks, where `stop_requested` was true.
            KeyboardInterrupt: at a SIGINT after the first signal.
        """
        self._agreed_signal = 0
        with self._together():
            self._claim()
        with self._signals.listening():
            yield
        if self._agreed_signal:
            raise SystemExit(128 + self._agreed_signal)
        if self._signals.received:
            signal.raise_signal(self._signals.received)

    def stop_requested(self) -> bool:
        """Return whether a rank has been told to stop: the same answer on all ranks, which call this after each update.

        With several ranks it costs one gather of 8 bytes, and makes the host wait for the device.
        """
        self._agreed_signal = self._signals.received
        if self._accelerator.num_processes > 1:
            received = torch.tensor([self._signals.received], device=self._accelerator.device)
            self._agreed_signal = int(self._accelerator.gather(received).max())
        return self._agreed_signal != 0

    def _check_saving(self, step: int, position: dict[str, Any]) -> None:
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        if not self._accelerator.sync_gradients:
            raise ValueError(
                f"step={step}: this is the middle of an accumulation window, whose gradients are not saved; save after "
                "the update"
            )
        try:
            json.dumps(position)
        except (TypeError, ValueError) as error:
            raise ValueError(f"position={position}: {error}; use numbers, strings, lists and dictionaries") from error

    def _claim(self) -> None:
        """Refuse a folder that is another run's or another process's, before anything is trained or written."""
        if not self._accelerator.is_main_process:
            return
        with files.writing(self.folder / files.LATEST):
            self._lock.acquire()
            sync(self.folder.parent)
        latest = files.read_latest(self.folder)
        if latest is not None and latest.name not in self._ours:
            raise ValueError(
                f"folder={str(self.folder)!r} holds {latest.name}, which this run neither saved nor resumed from; "
                "resume from it or choose another folder"
            )

    def _launch(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "num_processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "mixed_precision": str(accelerator.mixed_precision),
            "sharded": accelerator.is_fsdp2,
        }

    def _check_launch(self, found: Path, saved: dict[str, Any]) -> None:
        for name, value in self._launch().items():
            was = saved.get(name, False)  # `sharded` is younger than the others
            if was != value:
                raise ValueError(
                    f"checkpoint {found} was saved with {name}={was!r}, and this run has {value!r}: the resumed run "
                    f"would differ (each process has its own data, random numbers and schedule); launch it as before"
                )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Make all ranks leave the context together; where one fails, all raise."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        rank = self._accelerator.process_index
        reports = gather_object([None if error is None else f"rank {rank}: {type(error).__name__}: {error}"])
        if error is not None:
            raise error
        failures = [report for report in reports if report is not None]
        if failures:
            raise RuntimeError(f"a checkpoint failed on another rank: {failures[0]}")


class StopSignals:
    """Notes SIGTERM and SIGINT while it listens; `received` is the number of the first, or 0."""

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals inside; the handlers from before are back afterwards. Only for the main thread."""
        self.received = 0
        previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number


def _check_engine(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _REFUSED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ValueError(
            f"accelerator uses {kind.value}, whose loaders run what a file names; use DDP or FSDP2, or "
            "accelerator.save_state and load_state where you trust all checkpoints"
        )
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT:
        raise ValueError(
            f"state_dict_type={accelerator.state.fsdp_plugin.state_dict_type.name} gathers the whole model on one "
            "process; use SHARDED_STATE_DICT, with which each process writes its part"
        )
