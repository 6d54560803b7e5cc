import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def teacher_of(toy_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """A function that writes a teacher of an architecture on the first call, and returns its folder. Read only."""
    from reflow_students import write_teacher

    written: dict[str, Path] = {}

    def teacher_of(architecture: dict[str, Any]) -> Path:
        key = json.dumps(architecture)
        if key not in written:
            written[key] = write_teacher(toy_vlm, tmp_path_factory.mktemp("teachers") / "teacher", architecture)
        return written[key]

    return teacher_of


@pytest.fixture
def make(toy_vlm: Path, teacher_of: Callable[[dict[str, Any]], Path]) -> Callable[..., Any]:
    """A constructor of students whose trained weights differ from their teacher's."""
    from reflow_students import make_student

    def make(move_state_proj: bool = True, architecture: dict[str, Any] | None = None, **flags: Any) -> Any:
        architecture = architecture or {}
        return make_student(toy_vlm, teacher_of(architecture), architecture, move_state_proj, flags)

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    from reflow_students import make_batch

    return make_batch()


@pytest.fixture
def noise() -> Tensor:
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def time() -> Tensor:
    return torch.tensor([0.05, 0.4, 0.8, 1.0])


@pytest.fixture(scope="session", params=["pi0", "pi05"])
def pi(request: pytest.FixtureRequest) -> str:
    """The type of a stock π0 and of a stock π0.5, one after the other."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def pi_teacher(pi: str, toy_vlm: Path, toy_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a stock policy that lerobot trained and saved. Read only."""
    from lerobot_runs import train_teacher
    from pi0_toys import teacher_flags, toy_sizes

    with toy_sizes(toy_vlm, pi):
        return train_teacher(teacher_flags(pi), toy_dataset, tmp_path_factory.mktemp(pi) / "teacher")


@pytest.fixture(scope="session")
def random_teacher(pi: str, toy_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a stock policy with two cameras and random weights. Read only."""
    from pi0_toys import toy_sizes, write_teacher

    with toy_sizes(toy_vlm, pi):
        return write_teacher(tmp_path_factory.mktemp(pi) / "random", pi)


@pytest.fixture
def toy_pi(pi: str, toy_vlm: Path) -> Iterator[None]:
    """Make lerobot build its policy in toy size."""
    from pi0_toys import toy_sizes

    with toy_sizes(toy_vlm, pi):
        yield
