"""The latents of `train_lgt.py`: generated, from a folder, or from a dataset; and batches drawn from them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from hf_memopt.recipes.common.flags import readable
from hf_memopt.recipes.lgt.options import DataOptions, Options
from hf_memopt.training import split_batch

# start, time: where integration starts, and when; latents: the content; targets: style ids; target_latents: samples of
# those styles; style_weights: of each sample's style loss; dropped: samples without a style. Samples first.
Batch = dict[str, Tensor]

NUM_STYLES = 2  # of generated latents
STRENGTH = 0.7
_COLOURS = ((1.0, -1.0, 0.5, 0.0), (0.5, 0.5, -1.0, 1.0))  # of the styles, repeated where there are more channels


class Latents(NamedTuple):
    """Latents, `(num, channels, height, width)`, and their style ids, `(num,)`."""

    latents: Tensor
    styles: Tensor


def load(options: Options) -> tuple[Latents, Latents]:
    data = options.data
    if data.data_root is not None and data.dataset is not None:
        raise ValueError(f"data.data_root={data.data_root!r} and data.dataset={data.dataset!r}: give one of them")
    if data.data_root is not None:
        found = _from_folder(Path(data.data_root), data.style_subdirs, options.model.num_styles)
    elif data.dataset is not None:
        found = _from_dataset(data)
    else:
        found = _generated(options)
    _check(found, options)
    return _split(found, data)


def describe(options: Options) -> str:
    data = options.data
    if data.data_root is not None:
        return f"files in {data.data_root}"
    return f"generated textures, seed {data.data_seed}" if data.dataset is None else f"dataset {data.dataset}"


def _generated(options: Options) -> Latents:
    if options.model.num_styles != NUM_STYLES:
        raise ValueError(
            f"model.num_styles={options.model.num_styles}: generated latents have two styles; give data.data_root or "
            "data.dataset for more"
        )
    generator, num = torch.Generator().manual_seed(options.data.data_seed), options.data.num_generated
    contents = make_contents(NUM_STYLES * num, options.data.latent_size, options.model.latent_channels, generator)
    styles = torch.arange(NUM_STYLES).repeat_interleave(num)
    return Latents(in_style(contents, styles, generator), styles)


def _from_folder(root: Path, names: list[str] | None, num_styles: int) -> Latents:
    names = names or [f"style{number}" for number in range(num_styles)]
    read = [_read_style(root / name) for name in names]
    _check_sizes([each for of_style in read for each in of_style])
    of_styles = [torch.cat([latents for _, latents in of_style]) for of_style in read]
    styles = [torch.full((len(latents),), number) for number, latents in enumerate(of_styles)]
    return Latents(torch.cat(of_styles).float(), torch.cat(styles))


def _read_style(folder: Path) -> list[tuple[Path, Tensor]]:
    files = sorted(path for path in folder.glob("*") if path.suffix in (".pt", ".safetensors"))
    if not files:
        raise ValueError(f"data.data_root: no .pt or .safetensors files in {folder}; each style needs a folder of them")
    return [(file, latents) for file in files for latents in _read_file(file)]


def _check_sizes(found: list[tuple[Path, Tensor]]) -> None:
    first_file, first = found[0]
    for file, latents in found:
        if latents.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"data.data_root: {file} has latents of {tuple(latents.shape[1:])}, {first_file} of "
                f"{tuple(first.shape[1:])}; encode images of one size"
            )


def _read_file(file: Path) -> Iterator[Tensor]:
    """Yield the latents of a file, `(num, channels, height, width)`; a single one may lack its first dimension."""
    with readable(file):
        held = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    named = (
        held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list | tuple) else [("", held)]
    )
    for name, latents in named:
        if not (isinstance(latents, Tensor) and latents.is_floating_point() and latents.ndim in (3, 4)):
            kind = f"{latents.dtype}, {tuple(latents.shape)}" if isinstance(latents, Tensor) else type(latents).__name__
            place = "" if name == "" else f"{name!r}, "
            raise ValueError(
                f"data.data_root: {file} holds {place}{kind}; each entry must be latents, floating-point numbers "
                "(channels, height, width), with or without a dimension of samples before"
            )
        # Encoded with gradients on, they would bring their encoder's graph.
        yield latents.detach() if latents.ndim == 4 else latents.detach()[None]


def _from_dataset(data: DataOptions) -> Latents:
    from hf_memopt.datasets_by_name import dataset_by_name  # takes a second

    rows = dataset_by_name(str(data.dataset), data.split, field="data.dataset")
    columns = rows.with_format("torch", columns=[data.latent_column, data.style_column])[:]
    return Latents(columns[data.latent_column].float(), columns[data.style_column].long())


def _check(found: Latents, options: Options) -> None:
    channels = options.model.latent_channels
    shape = tuple(found.latents.shape[1:])
    if len(shape) != 3 or shape[0] != channels or shape[1] % 4 or shape[2] % 4:
        raise ValueError(
            f"model.latent_channels={channels}: latents are {shape}; they must be (channels, height, width), with "
            "sides that are multiples of 4"
        )
    counts = torch.bincount(found.styles, minlength=options.model.num_styles).tolist()
    if len(counts) != options.model.num_styles or min(counts) < 2:
        raise ValueError(
            f"model.num_styles={options.model.num_styles}: the data have {counts} latents of styles 0, 1, ...; each "
            "style needs two at least, and there may be no others"
        )


def _split(found: Latents, data: DataOptions) -> tuple[Latents, Latents]:
    """Hold out the same share of each style, one latent at least."""
    generator = torch.Generator().manual_seed(data.data_seed)
    shuffled = torch.randperm(len(found.styles), generator=generator)
    held_out = torch.zeros(len(shuffled), dtype=torch.bool)
    for style in found.styles.unique():
        rows = shuffled[found.styles[shuffled] == style]
        held_out[rows[: max(1, round(data.held_out * len(rows)))]] = True
    return Latents(*(each[~held_out] for each in found)), Latents(*(each[held_out] for each in found))


def make_contents(num: int, size: int, channels: int, generator: torch.Generator) -> Tensor:
    """Return smooth fields, `(num, channels, size, size)`; each channel of each has mean 0 and variance 1."""
    coarse = torch.randn(num, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=True)
    centred = smooth - smooth.mean(dim=(2, 3), keepdim=True)
    return centred / centred.std(dim=(2, 3), keepdim=True)


def in_style(contents: Tensor, styles: Tensor, generator: torch.Generator) -> Tensor:
    """Return contents with the texture of each one's style on them: noise of one colour, or another colour evenly."""
    num, channels, height, width = contents.shape
    grain = torch.randn(num, height, width, generator=generator)
    texture = torch.where(styles.view(-1, 1, 1) == 0, grain, torch.ones(()))
    colours = torch.tensor(_COLOURS)[:, torch.arange(channels) % 4]
    return contents + STRENGTH * texture[:, None] * colours[styles][:, :, None, None]


def make_batch(options: Options, device: torch.device | str) -> Batch:
    size, num = options.data.latent_size, options.training.batch_size
    latents, target_latents = (
        torch.randn(num, options.model.latent_channels, size, size, device=device) for _ in range(2)
    )
    targets = torch.arange(num, device=device) % options.model.num_styles
    dropped = torch.zeros(num, dtype=torch.bool, device=device)
    weights = torch.ones(num, device=device)
    times = (options.training.epsilon, options.training.latest_time)
    return assemble(latents, target_latents, targets, weights, dropped, times)


def assemble(
    latents: Tensor,
    target_latents: Tensor,
    targets: Tensor,
    style_weights: Tensor,
    dropped: Tensor,
    times: tuple[float, float],
) -> Batch:
    """Return a batch whose samples start between noise and content, at times from the earliest to the latest."""
    earliest, latest = times
    time = earliest + (latest - earliest) * torch.rand(len(latents), device=latents.device, dtype=latents.dtype)
    start = between(torch.randn_like(latents), latents, time)
    return {
        "start": start,
        "time": time,
        "latents": latents,
        "targets": targets,
        "target_latents": target_latents,
        "style_weights": style_weights,
        "dropped": dropped,
    }


def between(noise: Tensor, latents: Tensor, time: Tensor) -> Tensor:
    """Return noise at time 0, latents at time 1, `(batch, channels, height, width)`; `time` is `(batch,)`."""
    share = time.view(-1, 1, 1, 1)
    return (1 - share) * noise + share * latents


class LatentBank:
    """All training latents on one device, from which batches are drawn there: 16 KiB for each of 4 x 32 x 32."""

    def __init__(self, data: Latents, options: Options, device: torch.device) -> None:
        by_style = data.styles.argsort(stable=True)
        counts = torch.bincount(data.styles, minlength=options.model.num_styles)
        self._latents, self._styles = data.latents[by_style].to(device), data.styles[by_style].to(device)
        self._counts, self._first = counts.to(device), (counts.cumsum(0) - counts).to(device)
        weights = options.loss.style_weights or [1.0] * options.model.num_styles
        self._weights = torch.tensor(weights, device=device)
        self._options = options

    def of_styles(self, styles: Tensor) -> Tensor:
        drawn = torch.randint(2**31, styles.shape, device=styles.device)
        return self._latents[self._first[styles] + drawn % self._counts[styles]]

    def _of_others(self, style: int, rows: Tensor) -> Tensor:
        """Return as many rows at random whose style is another one."""
        count, first = self._counts[style], self._first[style]
        drawn = torch.randint(2**31, rows.shape, device=rows.device) % (len(self._styles) - count)
        return torch.where(drawn < first, drawn, drawn + count)  # rows of the style itself are skipped

    def micro_batches(self, window: list[Tensor], step: int, epsilon: float) -> list[Batch]:
        """Return one batch for each tensor of row numbers in `window`; with a gradient cache, parts of one batch."""
        training = self._options.training
        if training.gradient_cache:
            return list(split_batch(self._draw(torch.cat(window), f"{step}", epsilon), training.batch_size))
        return [self._draw(rows, f"{step} {number}", epsilon) for number, rows in enumerate(window)]

    def _draw(self, rows: Tensor, name: str, epsilon: float) -> Batch:
        """Return a batch with these contents. Its name decides its target, and if it has one, on all ranks alike."""
        training = self._options.training
        shared = random.Random(f"{training.seed} {name}")
        target, is_dropped = shared.randrange(len(self._counts)), shared.random() < training.label_drop_prob
        if training.target_styles == "permuted":
            targets = self._styles[rows][torch.randperm(len(rows), device=rows.device)]
        else:
            targets = torch.full_like(rows, target)
        if training.target_styles == "others":
            rows = torch.where(self._styles[rows] == target, self._of_others(target, rows), rows)
        dropped = torch.full_like(rows, is_dropped, dtype=torch.bool)
        times = (epsilon, training.latest_time)
        return assemble(self._latents[rows], self.of_styles(targets), targets, self._weights[targets], dropped, times)
