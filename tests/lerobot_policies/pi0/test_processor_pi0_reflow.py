from typing import Any

import pytest
import torch
from late_imports import LateModule

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
policies = LateModule("lerobot.policies")
pi0_toys = LateModule("pi0_toys")

pytestmark = pytest.mark.usefixtures("toy_pi")

STATISTICS = {"mean": 2.0, "std": 4.0, "q01": -2.0, "q99": 6.0}
# An action of 1 by mean and standard deviation, and by quantiles.
ONE = 6.0
STATE, IMAGE_KEYS = "observation.state", ("observation.images.top", "observation.images.wrist")


def described(processor: Any) -> list[tuple[type, dict[str, Any]]]:
    return [(type(step), step.get_config()) for step in processor.steps]


@pytest.fixture
def processors(pi: str) -> Any:
    """Stock lerobot's pre- and postprocessor, and a student's."""
    kind = pi0_toys.KINDS[pi]
    statistics = {
        feature: {name: torch.full((14,), value) for name, value in STATISTICS.items()} for feature in (STATE, "action")
    }
    return [
        policies.make_pre_post_processors(make(**pi0_toys.settings()), dataset_stats=statistics)
        for make in (kind.config, kind.student_config)
    ]


def test_the_steps_are_stock_lerobots(processors: Any) -> None:
    stock, ours = processors
    assert [described(each) for each in ours] == [described(each) for each in stock]
    assert torch.allclose(ours[1](torch.ones(1, 14)), torch.full((1, 14), ONE))


def test_a_state_is_read_once(pi: str, processors: Any) -> None:
    """Check that π0's state is a tensor, and π0.5's a part of its instruction."""
    seen = []
    policy = pi0_toys.KINDS[pi].student(pi0_toys.KINDS[pi].student_config(**pi0_toys.settings()))
    for state in (0.0, 1.0):
        images = {name: torch.zeros(3, 32, 32) for name in IMAGE_KEYS}
        frame = {**images, STATE: torch.full((14,), state), "task": "reach"}
        batches = [preprocess(dict(frame)) for preprocess, _ in processors]
        assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0] if name.startswith("obs"))
        seen.append(known_flows.observe(policy, batches[1]))
    assert torch.equal(seen[0].tokens, seen[1].tokens) == (pi == "pi0")
    assert (seen[0].state is None) == (pi == "pi05")
