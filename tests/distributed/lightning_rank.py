"""What each process of test_lightning_two_processes.py runs: `lightning_rank.py <folder>`.

Trains by Lightning's Trainer under DDP, plainly and offloaded, and leaves what came of it in
`<folder>/rank<number>.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from alone import leave
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


def outcomes(folder: Path, **settings: Any) -> dict[str, Any]:
    """By how it was trained."""
    found = {"plain": trained(folder, **settings)}
    for mode in ("all", "auto"):
        offloading = ActivationOffloading(offloader(mode))
        found[mode] = trained(folder, offloading, **settings)
        found[mode]["moved"] = offloading.offloader.stats.bytes_moved
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    results = {
        "plain": outcomes(folder),
        "accumulation and clipping": outcomes(folder, accumulate_grad_batches=2, gradient_clip_val=0.1),
        "manual optimization": outcomes(folder, model={"manual": True}),
    }
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave()
