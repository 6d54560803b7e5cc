from pathlib import Path

import numpy as np
import pytest
from late_imports import LateModule

demo = LateModule("benchmarks.metaworld.demo")
io_utils = LateModule("lerobot.utils.io_utils")


def write_video(file: Path, num_frames: int) -> Path:
    """Write a video that gets brighter, at 80 frames a second as in lerobot's Meta-World."""
    frames = [np.full((64, 64, 3), 2 * index, dtype=np.uint8) for index in range(num_frames)]
    io_utils.write_video(file, frames, 80)
    return file


def test_all_frames_of_a_video_are_read_in_order(tmp_path: Path) -> None:
    frames, seconds = demo.read_video(write_video(tmp_path / "a.mp4", 40))
    assert (len(frames), seconds) == (40, 0.5)
    brightness = [frame.mean() for frame in frames]
    assert brightness[0] < 10
    assert brightness[-1] > 70


def test_pictures_are_evenly_spaced_and_a_short_video_repeats_some() -> None:
    assert list(demo.evenly(15)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert list(demo.evenly(1)) == [0] * 8


def test_a_row_for_each_video(tmp_path: Path) -> None:
    from PIL import Image

    videos = {"teacher": write_video(tmp_path / "a.mp4", 40), "student": write_video(tmp_path / "b.mp4", 3)}
    demo.draw_film_strip(videos, tmp_path / "strip.png")
    with Image.open(tmp_path / "strip.png") as image:
        assert image.size == (800, 250)


def test_a_file_that_is_no_video_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="Invalid data"):
        demo.read_video(tmp_path / "a.mp4")
