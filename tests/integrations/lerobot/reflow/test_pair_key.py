"""What a pair depends on: what conditions the models, without padding, and how a frame was made into it."""

import dataclasses
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import these when the first test runs: collecting tests must not cost their seconds."""
    global coupling_inputs, load_config, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, preprocessing_sha256
    global without_padding
    from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS

    from hf_memopt.integrations.lerobot.policy_files import load_config
    from hf_memopt.integrations.lerobot.reflow.pair_key import coupling_inputs, preprocessing_sha256, without_padding


def test_padding_is_zero_and_cut_off(toy_student: Path) -> None:
    batch = {
        OBS_LANGUAGE_TOKENS: torch.tensor([[5, 6, 9, 9], [7, 9, 9, 9]]),
        OBS_LANGUAGE_ATTENTION_MASK: torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]),
        "action": torch.ones(2, 3),
    }
    inputs = without_padding(coupling_inputs(load_config(toy_student), batch))
    assert inputs.keys() == {OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK}
    assert inputs[OBS_LANGUAGE_TOKENS].tolist() == [[5, 6], [7, 0]]


def test_preprocessing_depends_on_statistics_that_normalise(toy_student: Path) -> None:
    config = load_config(toy_student)
    stats = {"observation.state": {"mean": [0.0, 1.0], "std": [1.0, 1.0], "max": [3.0, 3.0]}}
    before = preprocessing_sha256(config, stats)
    stats["observation.state"]["max"] = [4.0, 4.0]
    assert preprocessing_sha256(config, stats) == before
    stats["observation.state"]["mean"] = [0.0, 1.5]
    assert preprocessing_sha256(config, stats) != before
    assert preprocessing_sha256(dataclasses.replace(config, tokenizer_max_length=11), stats) != before
