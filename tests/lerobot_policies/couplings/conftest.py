import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cache of `make_spec()`, read only."""
    from coupling_toys import write

    path = tmp_path_factory.mktemp("couplings") / "cache"
    assert write(path) == []
    return path


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folder, tmp_path / "cache"))
