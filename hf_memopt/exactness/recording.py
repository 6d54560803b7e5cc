"""A recording: fingerprints of everything that a few training steps computed, and the cost of these steps."""

import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hf_memopt.exactness.fingerprint import Fingerprint

Phase = Literal["start", "input", "loss", "gradient", "setting", "result", "weight", "optimizer"]
# In the order of a step.
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a run."""

    step: int  # from 1 on; 0 before the first
    micro_batch: int  # backward passes of the step so far, this one included; 0 for tensors of a step's end
    phase: Phase
    name: str  # of the parameter, buffer, argument, state, or setting of an optimizer

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """A key by which places are in the order of a run."""
        phase = PHASES.index(self.phase)
        return self.step, phase >= PHASES.index("setting"), self.micro_batch, phase

    def __str__(self) -> str:
        micro_batch = f"micro-batch {self.micro_batch} of step {self.step}" if self.micro_batch else f"step {self.step}"
        in_words: dict[Phase, str] = {
            "start": f"{self.name} before the first step",
            "input": f"input {self.name} of {micro_batch}",
            "loss": f"{self.name} of {micro_batch}",
            "gradient": f"gradient of {self.name} after backward of {micro_batch}",
            "setting": f"{self.name} in {micro_batch}",
            "result": f"{f'result {self.name}'.strip()} of {micro_batch}",
            "weight": f"{self.name} after {micro_batch}",
            "optimizer": f"optimizer state {self.name} after {micro_batch}",
        }
        return in_words[self.phase]


@dataclass
class Recording:
    """The tensors that one process of a run computed, and their cost."""

    tensors: dict[TensorPlace, Fingerprint] = field(default_factory=dict)  # in the order in which they were recorded
    precision: str | None = None  # autocast's dtype, or "float16" for TF32, which has as many significant bits
    has_dropout: bool = False  # in a model that was trained
    not_deterministic: list[str] = field(default_factory=list)  # operations of torch's warnings
    peak_bytes: int | None = None  # as from `process_peak.peak_bytes`
    step_s: list[float] = field(default_factory=list)  # without the time of recording
    recording_s: float = 0.0

    @property
    def num_steps(self) -> int:
        return max((place.step for place in self.tensors), default=0)

    def before(self, place: TensorPlace) -> Fingerprint | None:
        """Return a gradient before the same step's backward pass, or a weight before the update."""
        match place.phase:
            case "gradient":
                earlier = replace(place, micro_batch=place.micro_batch - 1)
            case "weight":
                earlier = TensorPlace(place.step - 1, 0, "weight" if place.step > 1 else "start", place.name)
            case _:
                return None
        return self.tensors.get(earlier)

    def is_unchanged(self, place: TensorPlace) -> bool:
        """Return whether a backward pass added nothing to a gradient, or an update left a weight's bits."""
        found, before = self.tensors.get(place), self.before(place)
        return found is not None and before is not None and found.sha256 == before.sha256

    def write(self, file: Path) -> None:
        """Write the recording whole or not at all."""
        tensors = [[*vars(place).values(), *vars(print_).values()] for place, print_ in self.tensors.items()]
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({**vars(self), "tensors": tensors}))
        os.replace(draft, file)

    @classmethod
    def read(cls, file: Path) -> Self:
        found = json.loads(file.read_text())
        rows = found.pop("tensors")
        num = len(fields(TensorPlace))
        tensors = {TensorPlace(*row[:num]): Fingerprint(*map(_hashable, row[num:])) for row in rows}
        return cls(tensors=tensors, **found)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
