"""Couplings on disk, by sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_memopt.lerobot.couplings.coupling_spec import (
    Coupling,
    Observation,
    check_same,
    draw_noise,
    observation_checksums,
)
from hf_memopt.lerobot.couplings.store import CouplingFolder


class CouplingCache:
    """The couplings of one folder, by sample. Copies and pickles read and check the folder anew.

    Costs one read of the folder, and shows a bar if that takes more than ten seconds. Raises a ValueError that names
    the file if the folder is incomplete, damaged, or has shards of other couplings.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = CouplingFolder(Path(path).expanduser())
        self.description = self.folder.description
        self.has_observations: bool = self.description["stores_observations"]
        self._rows: Dataset = self.folder.read().with_format("torch")
        names = self._rows.with_format("torch", columns=["index"])
        self.indices: list[int] = names[: self.description["num_samples"]]["index"].tolist()
        self._position = {index: position for position, index in enumerate(self.indices)}

    def __reduce__(self) -> Any:
        return CouplingCache, (self.folder.path,)

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise a ValueError that names each field in which these couplings are not as expected."""
        check_same(self.folder.path, self.description, expected)

    def of(self, indices: Sequence[int], draws: Sequence[int], observation: Observation | None) -> Coupling:
        """Return one coupling of each sample, on the CPU; `observation=None` takes the stored one."""
        missing = [index for index in indices if index not in self._position]
        if missing:
            raise ValueError(
                f"{self.folder.path} has no couplings for sample {missing[0]}; precompute all samples that are used"
            )
        numbers = [draw * len(self.indices) + self._position[i] for i, draw in zip(indices, draws, strict=True)]
        self.folder.check_unchanged(numbers)
        rows = self._rows[numbers]
        if observation is None:
            observation = _stack([tensors_from_bytes(blob) for blob in rows["observation"]])
        self._check_observations(indices, rows["observation_checksum"], observation)
        noise = draw_noise(rows["noise_seed"].tolist(), self.description["shape"])
        return Coupling(observation, noise, rows["target"].reshape(noise.shape))

    def _check_observations(self, indices: Sequence[int], stored: Tensor, observation: Observation) -> None:
        differs = (observation_checksums(observation) != stored).nonzero()
        if len(differs):
            raise ValueError(
                f"the observation of sample {indices[int(differs[0])]} is not the one that its coupling in "
                f"{self.folder.path} was computed for: random augmentation, other data or other preprocessing. Train "
                "without augmentation, or precompute with the observations stored"
            )


def _stack(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Batch first; rows of different length get zeros at their end."""
    return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in samples[0]}
