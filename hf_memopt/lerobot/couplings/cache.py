"""Couplings on disk, by sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_memopt.lerobot.couplings.coupling_spec import Coupling, CouplingSpec, Observation
from hf_memopt.lerobot.couplings.key import CouplingKey, check_same, draw_noise, observation_checksums
from hf_memopt.lerobot.couplings.store import CouplingFolder


class CouplingCache:
    """The couplings of one folder, by sample. Copies and pickles read and check the folder anew.

    Args:
        path: where `precompute` wrote them.

    Raises:
        ValueError: incomplete, truncated, damaged, or with shards of other couplings; names the file. Costs one read
            of the folder, and shows a bar if that takes more than ten seconds.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = CouplingFolder(Path(path).expanduser())
        self.description = self.folder.description
        self._rows: Dataset = self.folder.read().with_format("torch")
        described = self.description
        names = self._rows.with_format("torch", columns=["index"])
        indices = names[: described["num_samples"]]["index"].tolist()
        key = CouplingKey(**{name: described[name] for name in CouplingKey.__dataclass_fields__})
        self.spec = CouplingSpec(
            key, indices, tuple(described["shape"]), described["num_draws"], described["batch_size"]
        )
        self._position = {index: position for position, index in enumerate(indices)}

    def __reduce__(self) -> Any:
        return CouplingCache, (self.folder.path,)

    @property
    def has_observations(self) -> bool:
        """Return whether the observations were stored with the couplings."""
        return bool(self.description["stores_observations"])

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise a ValueError that names each field in which these couplings are not as expected."""
        check_same(self.folder.path, self.description, expected)

    def of(self, indices: Sequence[int], draws: Sequence[int], observation: Observation | None) -> Coupling:
        """Return the couplings of some samples, on the CPU.

        Args:
            indices: names of the samples.
            draws: for each, which of its couplings.
            observation: the student's observation; None takes the stored one.

        Raises:
            ValueError: a sample without couplings, `observation` is not the one they were computed for, or the files
                were changed since they had been checked.
        """
        missing = [index for index in indices if index not in self._position]
        if missing:
            raise ValueError(
                f"{self.folder.path} has no couplings for sample {missing[0]}; precompute all samples that are used"
            )
        num_samples = len(self.spec.indices)
        numbers = [draw * num_samples + self._position[i] for i, draw in zip(indices, draws, strict=True)]
        self.folder.check_unchanged(numbers)
        rows = self._rows[numbers]
        if observation is None:
            observation = _stack([tensors_from_bytes(blob) for blob in rows["observation"]])
        self._check_observations(indices, rows["observation_checksum"], observation)
        noise = draw_noise(rows["noise_seed"].tolist(), self.spec.shape)
        target = rows["target"].reshape(noise.shape)
        return Coupling(list(indices), observation, noise, target)

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
