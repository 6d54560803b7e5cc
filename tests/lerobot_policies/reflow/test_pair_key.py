import dataclasses
from pathlib import Path

import torch
from late_imports import LateModule

policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
pair_key = LateModule("hf_memopt.lerobot.reflow.pair_source")
constants = LateModule("lerobot.utils.constants")


def test_padding_is_zero_and_cut_off(toy_student: Path) -> None:
    batch = {
        constants.OBS_LANGUAGE_TOKENS: torch.tensor([[5, 6, 9, 9], [7, 9, 9, 9]]),
        constants.OBS_LANGUAGE_ATTENTION_MASK: torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]),
        "action": torch.ones(2, 3),
    }
    inputs = pair_key.without_padding(pair_key.coupling_inputs(policy_files.load_config(toy_student), batch))
    assert inputs.keys() == {constants.OBS_LANGUAGE_TOKENS, constants.OBS_LANGUAGE_ATTENTION_MASK}
    assert inputs[constants.OBS_LANGUAGE_TOKENS].tolist() == [[5, 6], [7, 0]]


def test_preprocessing_depends_on_statistics_that_normalise(toy_student: Path) -> None:
    config = policy_files.load_config(toy_student)
    stats = {"observation.state": {"mean": [0.0, 1.0], "std": [1.0, 1.0], "max": [3.0, 3.0]}}
    before = pair_key.preprocessing_sha256(config, stats)
    stats["observation.state"]["max"] = [4.0, 4.0]
    assert pair_key.preprocessing_sha256(config, stats) == before
    stats["observation.state"]["mean"] = [0.0, 1.5]
    assert pair_key.preprocessing_sha256(config, stats) != before
    assert pair_key.preprocessing_sha256(dataclasses.replace(config, tokenizer_max_length=11), stats) != before
