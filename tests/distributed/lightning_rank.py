"""Training by Lightning's Trainer under DDP, plainly and offloaded, for test_lightning_two_processes.py."""

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning_toys import Regression, loader, offloader, trainer

from hf_memopt.integrations.lightning import ActivationOffloading


def trained(folder: Path, *callbacks: Any, model: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    module = Regression(**model or {})
    run = trainer(folder, *callbacks, devices=2, strategy="ddp", **settings)
    run.fit(module, loader(), loader(1))
    assert isinstance(run.strategy, DDPStrategy)
    return {
        "weights": [parameter.tolist() for parameter in module.parameters()],
        "losses": [loss.item() for loss in module.losses],
        "replaced": "training_step" in vars(run.strategy),
    }


def outcomes_of_modes(folder: Path, **settings: Any) -> dict[str, Any]:
    found = {"plain": trained(folder, **settings)}
    for mode in ("all", "auto"):
        offloading = ActivationOffloading(offloader(mode))
        found[mode] = trained(folder, offloading, **settings)
        found[mode]["moved"] = offloading.offloader.stats.bytes_moved
    return found


def outcomes(run_folder: str) -> dict[str, Any]:
    folder = Path(run_folder)
    return {
        "plain": outcomes_of_modes(folder),
        "accumulation and clipping": outcomes_of_modes(folder, accumulate_grad_batches=2, gradient_clip_val=0.1),
        "manual optimization": outcomes_of_modes(folder, model={"manual": True}),
    }
