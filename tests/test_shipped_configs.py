"""Shipped configurations are found by name where no clone is."""

from pathlib import Path

import pytest

from hf_memopt.recipes.common.shipped_configs import config_file, configs_folder


@pytest.mark.parametrize("name", ["lgt.json", "recipes/configs/lgt.json"])
def test_a_shipped_file_is_found_by_name(name: str) -> None:
    assert config_file("config", Path(name)) == configs_folder() / "lgt.json"


def test_the_users_own_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lgt.json").write_text("{}")
    assert config_file("config", Path("lgt.json")) == Path("lgt.json")


def test_a_file_that_is_nowhere_is_named_beside_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config='own/lgt.json': there is no such file; .* causal_lm_demo.yaml, .*"):
        config_file("config", Path("own/lgt.json"))
    with pytest.raises(ValueError, match="there is no such file"):
        config_file("config", tmp_path)


def test_the_configurations_of_accelerate_are_shipped() -> None:
    assert (configs_folder() / "accelerate" / "ddp.yaml").is_file()
