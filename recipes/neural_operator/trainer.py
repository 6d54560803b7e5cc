"""The training of `train_neural_operator.py` by neuralop's own Trainer instead of a loop of its own."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from neuralop import Trainer

from hf_memopt.recipes.common.loop import make_schedule
from hf_memopt.recipes.common.results import RunCost, announce
from hf_memopt.recipes.neural_operator.data import Data
from hf_memopt.recipes.neural_operator.options import Options
from hf_memopt.recipes.neural_operator.step import Run, make_model, make_optimizer, relative_errors


def train_with_trainer(
    options: Options, samples: Data, loaders: list[Any], accelerator: Accelerator
) -> tuple[Run, RunCost]:
    """Train and evaluate; return the run and the cost of an update.

    Its schedule advances once per epoch, and its loss is a sum over the batch, which AdamW's step hardly depends on.
    """
    _check_launch(accelerator)
    training = options.training
    set_seed(training.seed)
    model = make_model(options.model, *samples.shape.for_model()).to(accelerator.device)
    optimizer = make_optimizer(model, training)
    run = Run(accelerator, options, model, optimizer, processor=samples.processor)
    run.finite = run.finite_check(model, optimizer)
    if run.offloader is not None:
        run.offloader.wrap(model)  # all that Trainer needs
    announce(model, options.offload, accelerator)
    timer = run.timer()
    model.register_forward_pre_hook(lambda *event: timer.begin())
    optimizer.register_step_post_hook(lambda *event: timer.end())
    used = relative_errors(len(samples.shape.sides))
    loss = WatchedLoss(used[training.train_loss], run)
    optimizer.register_step_pre_hook(lambda *event: loss.before_update())
    by_epoch = replace(training, warmup_steps=training.warmup_steps // len(loaders[0]))
    scheduler = make_schedule(optimizer, by_epoch, training.epochs, num_processes=1)
    trainer = Trainer(
        model=model,
        n_epochs=training.epochs,
        device=accelerator.device,
        data_processor=samples.processor,
        eval_interval=training.eval_every,
    )
    tests = dict(zip(samples.tests, loaders[1:], strict=True))
    with warnings.catch_warnings():
        # It passes whole samples to models and losses, which warn of the parts that they do not use.
        warnings.filterwarnings("ignore", message=".*received unexpected keyword arguments")
        trained = trainer.train(loaders[0], tests, optimizer, scheduler, training_loss=loss, eval_losses=used)
        cost = run.cost(timer)
        errors = trainer.evaluate_all(training.epochs, used, tests, eval_modes={})
    run.progress.history.append(_entry(training.epochs, trained["avg_loss"], errors))
    return run, cost


class WatchedLoss:
    """The training loss, whose values and gradients are looked at before each update."""

    def __init__(self, loss: Any, run: Run) -> None:
        self._loss, self._run = loss, run
        self._value = torch.zeros(())

    def __call__(self, *tensors: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = self._loss(*tensors, **options)
        self._value = loss.detach()  # not its graph
        return loss

    def before_update(self) -> None:
        self._run.end_micro_batch(self._value)
        self._run.before_update()
        self._run.progress.num_updates += 1


def _check_launch(accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1:
        raise ValueError(
            f"loop='neuralop' is for one process, and there are {accelerator.num_processes}; use --loop accelerate"
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"loop='neuralop' cannot take mixed_precision={accelerator.mixed_precision!r}: Trainer would run in "
            "float16 without scaling the loss; use --loop accelerate"
        )


def _entry(epoch: int, loss: float, errors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return Trainer's `<resolution>_<norm>` in the form of this recipe's own log."""
    named = {"_".join(reversed(name.split("_"))): float(error) for name, error in errors.items()}
    return {"epoch": epoch, "loss": float(loss), **named}
