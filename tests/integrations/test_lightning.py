"""Lightning's Trainer with offloading: the plain run's weights, and its own strategy afterwards."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

from hf_memopt import OffloadedOptimizer

ours = LateModule("hf_memopt.integrations.lightning")
toys = LateModule("lightning_toys")

# Lightning's own warnings: advice about workers and validation, and calls of its pytree helper.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning")]


def trained(folder: Path, *callbacks: Any, model: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    module = toys.Regression(**model or {})
    toys.trainer(folder, *callbacks, **settings).fit(module, toys.loader(), toys.loader(1))
    return module.state_dict()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"model": {"manual": True}},
    ],
    ids=["plain", "accumulation and clipping", "bf16", "manual optimization"],
)
@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.sweep(share=0.25)
def test_weights_are_those_of_the_plain_run(tmp_path: Path, settings: dict[str, Any], mode: str) -> None:
    offloading = ours.ActivationOffloading(toys.offloader(mode))
    assert equal(trained(tmp_path, offloading, **settings), trained(tmp_path, **settings))
    assert offloading.offloader.stats.bytes_moved > 0


def test_a_resumed_run_goes_on_as_the_plain_one_does(tmp_path: Path) -> None:
    def resumed(*callbacks: Any) -> dict[str, Any]:
        first, module = toys.trainer(tmp_path, *callbacks, max_epochs=1), toys.Regression()
        first.fit(module, toys.loader(), toys.loader(1))
        first.save_checkpoint(checkpoint)
        saved.append(torch.load(checkpoint, weights_only=False))
        torch.manual_seed(5)
        toys.trainer(tmp_path, *callbacks).fit(
            module, toys.loader(), toys.loader(1), ckpt_path=checkpoint, weights_only=False
        )
        return module.state_dict()

    checkpoint, saved = tmp_path / "half.ckpt", []
    assert equal(resumed(ours.ActivationOffloading(toys.offloader())), resumed())
    assert saved[0]["callbacks"] == saved[1]["callbacks"]  # without the callback


def test_after_an_exception_the_strategy_is_as_it_was_and_the_next_run_is_right(tmp_path: Path) -> None:
    offloading = ours.ActivationOffloading(toys.offloader())
    trainer = toys.trainer(tmp_path, offloading)
    with pytest.raises(RuntimeError, match="injected"):
        trainer.fit(toys.Regression(fail_at=2), toys.loader())
    assert "training_step" not in vars(trainer.strategy)
    assert offloading.offloader.stats.host_bytes_live == 0
    assert equal(trained(tmp_path, offloading), trained(tmp_path))


def test_validation_is_left_alone(tmp_path: Path) -> None:
    """Check a validation that records gradients."""
    offloading = ours.ActivationOffloading(toys.offloader())
    trainer = toys.trainer(tmp_path, offloading, inference_mode=False)
    trainer.fit(module := toys.Regression(), toys.loader())
    moved = offloading.offloader.stats.bytes_moved
    trainer.validate(module, toys.loader(), verbose=False)
    assert offloading.offloader.stats.bytes_moved == moved > 0
    assert "training_step" not in vars(trainer.strategy)


def test_what_it_did_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_memopt"):
        trained(tmp_path, ours.ActivationOffloading(toys.offloader()))
        assert "moved to the host" in caplog.text
        trained(tmp_path, ours.ActivationOffloading("all"))
    assert "activation offloading moved nothing" in caplog.text


def test_an_offloaded_optimizer_is_refused_for_its_closures(tmp_path: Path) -> None:
    class Away(toys.Regression):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return OffloadedOptimizer(torch.optim.AdamW(self.parameters()))

    with pytest.raises(ValueError, match=r"^closure is not supported by OffloadedOptimizer"):
        toys.trainer(tmp_path).fit(Away(), toys.loader(), toys.loader(1))


def test_two_offloaders_are_refused(tmp_path: Path) -> None:
    one, other = (ours.ActivationOffloading(toys.offloader()) for _ in range(2))
    trainer = toys.trainer(tmp_path, one, other)
    with pytest.raises(ValueError, match="two do not stack"):
        trainer.fit(toys.Regression(), toys.loader())
    assert "training_step" not in vars(trainer.strategy)
    module = toys.Regression()
    handle = toys.offloader().wrap(module)
    with pytest.raises(ValueError, match="two do not stack"):
        toys.trainer(tmp_path, one).fit(module, toys.loader())
    handle.remove()
    with pytest.raises(ValueError, match="neither an ActivationOffloader nor"):
        ours.ActivationOffloading(3)
