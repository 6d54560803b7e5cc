import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun

from hf_memopt.recipes.causal_lm import options as causal_lm_options
from hf_memopt.recipes.common.options import check_folder
from hf_memopt.recipes.fluxflow import options as fluxflow_options
from hf_memopt.recipes.neural_operator import options as neural_operator_options


def by_flags(parse: Callable[..., Any]) -> Callable[[Path, str], Any]:
    return lambda output, name: parse("", [f"--output_dir={output}", f"--resume_from_checkpoint={name}"])


CHECKS: dict[str, Callable[[Path, str], Any]] = {
    "causal_lm": by_flags(causal_lm_options.parse),
    "fluxflow": by_flags(fluxflow_options.parse),
    "neural_operator": by_flags(neural_operator_options.parse),
    "lgt": lambda output, name: check_folder(str(output), name, "checkpoint.save_dir"),
}


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    ToyRun(tmp_path / "used" / "checkpoints").train(2, save=True)
    return tmp_path / "used"


@pytest.mark.parametrize("recipe", CHECKS)
def test_what_cannot_be_resumed_is_refused_with_the_flags(recipe: str, used: Path, tmp_path: Path) -> None:
    check, other = CHECKS[recipe], shutil.copytree(used, tmp_path / "other")
    with pytest.raises(ValueError, match=r"is none of those in .*, which holds step-000002, .* choose another folder"):
        check(used, str(other / "checkpoints" / "step-000001"))
    with pytest.raises(ValueError, match="step-000007': no such folder"):
        check(used, "step-000007")
    check(used, "latest")
    check(tmp_path / "new", str(other / "checkpoints" / "step-000001"))
