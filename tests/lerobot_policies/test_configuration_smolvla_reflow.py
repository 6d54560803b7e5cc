import dataclasses
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

policy_files = LateModule("hf_memopt.lerobot.files.policy_files")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reflow_real_data": 0.1, "prefix_length": 100}, "needs prefix_length=-1; 100 is set"),
        ({"use_cache": False}, "use_cache=false: SmolVLA cannot sample without its cache"),
    ],
)
def test_unusable_settings_are_refused_by_name(toy_student: Path, changes: dict[str, Any], message: str) -> None:
    config = policy_files.load_config(toy_student)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)
    dataclasses.replace(config, use_reflow=False, **changes)
