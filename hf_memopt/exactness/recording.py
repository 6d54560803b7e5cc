"""Fingerprints of tensors, and recordings of those that a few training steps computed, with the cost of these steps."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

NUM_SUMS = 256
_HOST = torch.device("cpu")  # named, since a program may have another default device
# Elements that are on the host at a time.
_CHUNK = 2**20


@dataclass(frozen=True)
class Fingerprint:
    """The digest of a tensor's bits, which shows any difference, and a sketch, which measures its size.

    The sketch is a count sketch (Charikar, Chen and Farach-Colton, 2002): each element is added, with a random sign
    that is the same in all runs, to one of `NUM_SUMS` sums. The norm of the difference of two sketches estimates that
    of the tensors' difference, with a standard error of some 5 percent; for a tensor of at most `NUM_SUMS` elements it
    is exact. A fingerprint takes about 5 KB, however large its tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    norm: float
    num_not_finite: int  # elements that are infinite or no number; the norm and the sketch leave them out
    sketch: tuple[float, ...]  # `NUM_SUMS` sums, or the elements themselves if they are fewer
    # Significant bits of float32 elements: 8 if all come from bfloat16; 0 for other dtypes and powers of two.
    num_bits: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Take the fingerprint of a dense tensor. Costs one copy to the host, some MiB at a time."""
        digest = hashlib.sha256()
        sums, squares, num_not_finite, position = torch.zeros(NUM_SUMS, dtype=torch.float64, device=_HOST), 0.0, 0, 0
        mantissas = 0
        for piece in _pieces(tensor.detach()):
            on_host = piece.resolve_conj().resolve_neg().cpu().contiguous()
            digest.update(on_host.view(torch.uint8).numpy())
            if tensor.dtype == torch.float32:
                mantissas |= _bits_of_any(on_host.view(torch.int32)) & 0x7FFFFF
            values = (torch.view_as_real(on_host).flatten() if on_host.is_complex() else on_host).double()
            square = float(values.dot(values))
            if not math.isfinite(square):
                finite = values.isfinite()
                num_not_finite += int((~finite).sum())
                values = values.where(finite, 0.0)
                square = float(values.dot(values))
            squares += square
            sums += _signed_sums(values, position)
            position += len(values)
        return cls(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            sha256=digest.hexdigest(),
            norm=math.sqrt(squares),
            num_not_finite=num_not_finite,
            sketch=tuple(sums[:position].tolist()),
            num_bits=25 - (mantissas & -mantissas).bit_length() if mantissas else 0,
        )

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def value(self) -> float | None:
        """The value of a single element."""
        return self.sketch[0] if self.num_elements == 1 and not self.num_not_finite else None

    def distance(self, other: "Fingerprint") -> float:
        """Return the estimated norm of the difference; infinite for other sizes, or where either is not finite."""
        if self.num_elements != other.num_elements or self.num_not_finite or other.num_not_finite:
            return math.inf
        return math.dist(self.sketch, other.sketch)

    def minus(self, other: Self) -> Self:
        """Return the fingerprint of a difference of two tensors as far as their sketches tell, without a digest."""
        sketch = tuple(map(float.__sub__, self.sketch, other.sketch))
        return replace(self, sha256="", norm=math.hypot(*sketch), sketch=sketch)

    def along(self, other: "Fingerprint") -> float:
        """Return the multiple of this tensor that is nearest to the other one."""
        return math.sumprod(self.sketch, other.sketch) / math.sumprod(self.sketch, self.sketch)

    def without(self, other: Self) -> Self:
        """Return the fingerprint of the part of this tensor that is not along another one, without a digest."""
        share = other.along(self) if any(other.sketch) else 0.0
        return self.minus(replace(other, sketch=tuple(share * each for each in other.sketch)))

    def is_parallel(self, other: "Fingerprint", least: float = 0.9) -> bool:
        """Return whether most of the other tensor is a multiple of this one, other than by chance."""
        product = math.hypot(*self.sketch) * math.hypot(*other.sketch)
        return len(self.sketch) > 3 and abs(math.sumprod(self.sketch, other.sketch)) > least * product

    def relative(self, other: "Fingerprint") -> float:
        """Return the norm of the difference as a share of this tensor's norm."""
        distance = self.distance(other)
        if not distance:
            return 0.0
        return distance / self.norm if self.norm else math.inf

    def factor_to(self, other: "Fingerprint") -> float | None:
        """Return the number by which this tensor is multiplied in the other one, if the other one is its multiple.

        A single element is a multiple of any other one, which shows nothing.
        """
        if not math.isfinite(self.distance(other)) or not any(self.sketch) or self.num_elements == 1:
            return None
        factor = self.along(other)
        rest = math.dist([factor * each for each in self.sketch], other.sketch)
        return factor if rest <= 1e-3 * math.hypot(*other.sketch) else None


def parts_of(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that hold a tensor's bytes, with suffixes for its name where they are several.

    Those of a wrapper such as a DTensor or a quantised tensor are inside of it.
    """
    if tensor.layout == torch.sparse_coo:
        found = tensor.coalesce()
        yield from ((".indices", found.indices()), (".values", found.values()))
        return
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield "", tensor
        return
    names, _ = flatten()
    for name in names:
        for suffix, part in parts_of(getattr(tensor, name)):
            yield (f".{name}{suffix}" if len(names) > 1 else suffix), part


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements in their order, at most `_CHUNK` at a time, without a copy of the whole."""
    if tensor.numel() <= _CHUNK or tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1), _CHUNK)
        return
    rows = max(1, _CHUNK // tensor[0].numel())
    for part in torch.split(tensor, rows):
        yield from _pieces(part if len(part) > 1 or part.numel() <= _CHUNK else part[0])


def _bits_of_any(integers: Tensor) -> int:
    """Return the bits that are set in at least one of some integers."""
    while len(integers) > 1:
        half = (len(integers) + 1) // 2  # of an odd number, both halves have the middle one
        integers = integers[:half] | integers[-half:]
    return int(integers[0]) if len(integers) else 0


def _signed_sums(values: Tensor, position: int) -> Tensor:
    """Return the sums to which elements from `position` on add; chunks have the same signs, or all of them turned."""
    signs, sums = _signs(), torch.zeros(NUM_SUMS, dtype=torch.float64, device=_HOST)
    while len(values):
        chunk, begin = divmod(position, _CHUNK)
        part, skipped = values[: _CHUNK - begin], begin % NUM_SUMS
        padded = torch.zeros(-(-(skipped + len(part)) // NUM_SUMS), NUM_SUMS, dtype=torch.float64, device=_HOST)
        torch.mul(part, signs[begin : begin + len(part)], out=padded.view(-1)[skipped : skipped + len(part)])
        sums += padded.sum(0) * signs[chunk % _CHUNK]
        position, values = position + len(part), values[len(part) :]
    return sums


@cache
def _signs() -> Tensor:
    generator = torch.Generator(_HOST).manual_seed(0)
    return torch.randint(0, 2, (_CHUNK,), generator=generator, device=_HOST).mul_(2).sub_(1).double()


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
