"""Canaries of the project in lerobot's real-time chunking."""

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by

configuration_rtc = LateModule("lerobot.policies.rtc.configuration_rtc")
modeling_rtc = LateModule("lerobot.policies.rtc.modeling_rtc")

EXPORT = "hf_memopt/lerobot/student/prepare.py"


@pytest.mark.parametrize("weight", [1.0, 2.0, 10.0])
def test_the_first_velocity_is_corrected_by_the_guidance_weight_times_the_error(weight: float) -> None:
    """An Euler step of size 1 / n moves the chunk by weight / n of the error, so that n is the weight that fits."""
    generator = torch.Generator().manual_seed(0)
    noise, velocity, left_over = (torch.randn(1, 6, 2, generator=generator) for _ in range(3))
    with relied_on_by(EXPORT):
        config = configuration_rtc.RTCConfig(max_guidance_weight=weight, execution_horizon=4)
        guided = modeling_rtc.RTCProcessor(config).denoise_step(
            noise, left_over, 4, 1.0, lambda x_t: velocity, execution_horizon=4
        )
        error = left_over - (noise - velocity)
        torch.testing.assert_close(guided[:, :4], (velocity - weight * error)[:, :4])
        assert torch.equal(guided[:, 4:], velocity[:, 4:])


def test_export_finds_guidance_in_the_configuration() -> None:
    with relied_on_by(EXPORT):
        assert configuration_rtc.RTCConfig().max_guidance_weight == 10.0
