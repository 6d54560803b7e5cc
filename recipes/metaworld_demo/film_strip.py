"""A film strip of the first test episodes, from the videos that `lerobot-eval` recorded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from hf_memopt.recipes.common.results import drawn

NUM_PICTURES = 8
DPI = 100


def draw_film_strip(videos: Mapping[str, Path], file: Path) -> None:
    """Draw a row for each video, by its title."""
    with drawn(file, len(videos), NUM_PICTURES, DPI, figsize=(NUM_PICTURES, 1.25 * len(videos)), squeeze=False) as grid:
        for row, (title, video) in zip(grid, videos.items(), strict=True):
            frames, seconds = read_video(video)
            for axes, index in zip(row, evenly(len(frames)), strict=True):
                axes.imshow(frames[index])
                axes.set(xticks=[], yticks=[])
                axes.set_xlabel(f"{index * seconds / len(frames):.2f} s", fontsize=7)
            # A title wider than its picture would push the next one away; so an empty one keeps the height for it.
            row[0].text(0, 1.08, title, transform=row[0].transAxes, fontsize=8).set_in_layout(False)
            row[1].set_title(" ", fontsize=8)


def evenly(num_frames: int) -> Sequence[int]:
    return [round(each) for each in np.linspace(0, num_frames - 1, NUM_PICTURES)]


def read_video(file: Path) -> tuple[list[NDArray[np.uint8]], float]:
    with av.open(str(file)) as container:
        frames: list[Any] = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = container.streams.video[0].average_rate
    if not frames or rate is None:
        raise ValueError(f"{file} holds no pictures; evaluate again")
    return frames, len(frames) / float(rate)
