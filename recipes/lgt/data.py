"""The latents of `train_lgt.py`: generated, from a folder, or from a dataset; and batches drawn from them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_memopt.recipes.lgt import textures
from hf_memopt.recipes.lgt.config import Config, DataConfig
from hf_memopt.recipes.lgt.step import Batch, assemble
from hf_memopt.training import split_batch


class Latents(NamedTuple):
    """Latents, `(num, channels, height, width)`, and their style ids, `(num,)`."""

    latents: Tensor
    styles: Tensor


def load(config: Config) -> tuple[Latents, Latents]:
    """Training and held-out latents, on the CPU.

    Raises:
        ValueError: no such data, or other shapes and styles than the configuration's.
    """
    data = config.data
    if data.data_root is not None and data.dataset is not None:
        raise ValueError(f"data.data_root={data.data_root!r} and data.dataset={data.dataset!r}: give one of them")
    if data.data_root is not None:
        found = _from_folder(Path(data.data_root), data.style_subdirs, config.model.num_styles)
    elif data.dataset is not None:
        found = _from_dataset(data)
    else:
        found = _generated(config)
    _check(found, config)
    return _split(found, data)


def describe(config: Config) -> str:
    """Where the latents come from."""
    data = config.data
    if data.data_root is not None:
        return f"files in {data.data_root}"
    return f"generated textures, seed {data.data_seed}" if data.dataset is None else f"dataset {data.dataset}"


def _generated(config: Config) -> Latents:
    if config.model.num_styles != textures.NUM_STYLES:
        raise ValueError(
            f"model.num_styles={config.model.num_styles}: generated latents have two styles; give data.data_root or "
            "data.dataset for more"
        )
    generator = torch.Generator().manual_seed(config.data.data_seed)
    sizes = config.data.num_generated, config.data.latent_size, config.model.latent_channels
    return Latents(*textures.make_latents(*sizes, generator))


def _from_folder(root: Path, names: list[str] | None, num_styles: int) -> Latents:
    names = names or [f"style{number}" for number in range(num_styles)]
    of_styles = [_read_style(root / name) for name in names]
    styles = [torch.full((len(latents),), number) for number, latents in enumerate(of_styles)]
    return Latents(torch.cat(of_styles).float(), torch.cat(styles))


def _read_style(folder: Path) -> Tensor:
    files = sorted(path for path in folder.glob("*") if path.suffix in (".pt", ".safetensors"))
    if not files:
        raise ValueError(f"data.data_root: no .pt or .safetensors files in {folder}; each style needs a folder of them")
    return torch.cat([latents for file in files for latents in _read_file(file)])


def _read_file(file: Path) -> Iterator[Tensor]:
    """Latents of a file, `(num, channels, height, width)`; a single one may lack its first dimension."""
    held = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    for tensor in held.values() if isinstance(held, dict) else [held]:
        yield tensor if tensor.ndim == 4 else tensor[None]


def _from_dataset(data: DataConfig) -> Latents:
    from datasets import DatasetDict, load_dataset, load_from_disk

    name = str(data.dataset)
    found = load_from_disk(name) if Path(name).is_dir() else load_dataset(name, trust_remote_code=False)
    rows = found[data.split] if isinstance(found, DatasetDict) else found
    columns = rows.with_format("torch", columns=[data.latent_column, data.style_column])[:]
    return Latents(columns[data.latent_column].float(), columns[data.style_column].long())


def _check(found: Latents, config: Config) -> None:
    channels = config.model.latent_channels
    shape = tuple(found.latents.shape[1:])
    if len(shape) != 3 or shape[0] != channels or shape[1] % 4 or shape[2] % 4:
        raise ValueError(
            f"model.latent_channels={channels}: latents are {shape}; they must be (channels, height, width), with "
            "sides that are multiples of 4"
        )
    counts = torch.bincount(found.styles, minlength=config.model.num_styles).tolist()
    if len(counts) != config.model.num_styles or min(counts) < 2:
        raise ValueError(
            f"model.num_styles={config.model.num_styles}: the data have {counts} latents of styles 0, 1, ...; each "
            "style needs two at least, and there may be no others"
        )


def _split(found: Latents, data: DataConfig) -> tuple[Latents, Latents]:
    """Hold out the same share of each style, one latent at least."""
    generator = torch.Generator().manual_seed(data.data_seed)
    shuffled = torch.randperm(len(found.styles), generator=generator)
    held_out = torch.zeros(len(shuffled), dtype=torch.bool)
    for style in found.styles.unique():
        rows = shuffled[found.styles[shuffled] == style]
        held_out[rows[: max(1, round(data.held_out * len(rows)))]] = True
    return Latents(*(each[~held_out] for each in found)), Latents(*(each[held_out] for each in found))


class LatentBank:
    """All training latents on one device, from which batches are drawn there.

    Args:
        data: of all styles.
        config: decides about target styles, weights and label drop.
        device: 16 KiB for each latent of 4 x 32 x 32.
    """

    def __init__(self, data: Latents, config: Config, device: torch.device) -> None:
        by_style = data.styles.argsort(stable=True)
        counts = torch.bincount(data.styles, minlength=config.model.num_styles)
        self._latents, self._styles = data.latents[by_style].to(device), data.styles[by_style].to(device)
        self._counts, self._first = counts.to(device), (counts.cumsum(0) - counts).to(device)
        weights = config.loss.style_weights or [1.0] * config.model.num_styles
        self._weights = torch.tensor(weights, device=device)
        self._config = config

    def __len__(self) -> int:
        return len(self._latents)

    def of_styles(self, styles: Tensor) -> Tensor:
        """A latent of each style, drawn at random."""
        drawn = torch.randint(2**31, styles.shape, device=styles.device)
        return self._latents[self._first[styles] + drawn % self._counts[styles]]

    def micro_batches(self, window: list[Tensor], step: int, epsilon: float) -> list[Batch]:
        """One batch for each tensor of row numbers in `window`; under GradientCache they are parts of one batch."""
        training = self._config.training
        if training.gradient_cache:
            return list(split_batch(self._draw(torch.cat(window), f"{step}", epsilon), training.batch_size))
        return [self._draw(rows, f"{step} {number}", epsilon) for number, rows in enumerate(window)]

    def _draw(self, rows: Tensor, name: str, epsilon: float) -> Batch:
        """A batch with these contents. Its target and whether it has one are the same on all ranks, by its name."""
        training = self._config.training
        shared = random.Random(f"{training.seed} {name}")
        target, is_dropped = shared.randrange(len(self._counts)), shared.random() < training.label_drop_prob
        if training.target_styles == "permuted":
            targets = self._styles[rows][torch.randperm(len(rows), device=rows.device)]
        else:
            targets = torch.full_like(rows, target)
        dropped = torch.full_like(rows, is_dropped, dtype=torch.bool)
        return assemble(self._latents[rows], self.of_styles(targets), targets, self._weights[targets], dropped, epsilon)
