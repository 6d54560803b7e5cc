import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from late_imports import LateModule
from torch import Tensor, nn

stop_on_non_finite = LateModule("hf_memopt.callbacks.stop_on_non_finite")
trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")


class Poison(torch.autograd.Function):
    """An identity whose gradient is `value` in bad micro-batches."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: float) -> Tensor:
        ctx.value = value
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.value, None


class Regression(nn.Module):
    """A regression with poison between its layers in the micro-batches of `bad`, counted from 0."""

    def __init__(self, bad: dict[int, float] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)
        self.bad = bad or {}
        self.count = itertools.count()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        if self.training:
            hidden = Poison.apply(hidden, self.bad.get(next(self.count), 1.0))
        prediction = self.last(torch.dropout(hidden, 0.1, self.training))
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


def make_trainer(folder: Path, bad: dict[int, float] | None, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(24)]
    settings = trainer_toys.SETTINGS | {"max_steps": 6, "disable_tqdm": True} | options
    arguments = transformers.TrainingArguments(str(folder), **settings)
    return transformers.Trainer(
        Regression(bad), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks)
    )


def num_hooks(model: nn.Module) -> int:
    return sum(len(parameter._backward_hooks or {}) for parameter in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_bad_step_is_named_and_changes_nothing(
    tmp_path: Path, value: float, max_grad_norm: float, micro_batch: int
) -> None:
    """Check also with clipping, which makes all gradients NaN before the callback reads them."""
    snapshots = trainer_toys.Snapshots()
    bad = {6 + micro_batch - 1: value}  # in the fourth step
    callbacks = snapshots, stop_on_non_finite.StopOnNonFiniteCallback()
    trainer = make_trainer(tmp_path, bad, *callbacks, max_grad_norm=max_grad_norm)
    with pytest.raises(
        stop_on_non_finite.NonFiniteGradientError, match=rf"step 4\..*\n  rank 0, micro-batch {micro_batch}: "
    ) as caught:
        trainer.train()
    assert caught.value.step == 4
    ((number, names),) = caught.value.findings[0]
    assert number == micro_batch
    assert sorted(names) == ["first.bias", "first.weight"]  # not `last`, which backward reaches before the poison
    assert len(snapshots.after) == 3
    assert all(torch.equal(a, b) for a, b in zip(trainer_toys.copies(trainer.model), snapshots.after[-1], strict=True))
    assert num_hooks(trainer.model) == 0


def test_without_it_the_parameters_are_lost(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, {6: float("nan")}, logging_steps=1)
    trainer.train()
    assert all(parameter.isnan().all() for parameter in trainer.model.parameters())


def test_training_is_bitwise_what_it_is_without(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    plain, watched = trainer_toys.Snapshots(), trainer_toys.Snapshots()
    make_trainer(tmp_path, None, plain, **options).train()
    trainer = make_trainer(tmp_path, None, watched, stop_on_non_finite.StopOnNonFiniteCallback(), **options)
    trainer.train()
    assert len(plain.after) == 6
    for a, b in zip(plain.after, watched.after, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert num_hooks(trainer.model) == 0


def test_resumes_and_starts_over(tmp_path: Path) -> None:
    """Check that steps count from the start of training, and that a second start leaves one set of hooks."""
    make_trainer(tmp_path, None, max_steps=2, save_strategy="steps", save_steps=2).train()
    callback = stop_on_non_finite.StopOnNonFiniteCallback()
    trainer = make_trainer(tmp_path, {3: float("nan")}, callback)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    with pytest.raises(stop_on_non_finite.NonFiniteGradientError, match="step 4") as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ((number, names),) = caught.value.findings[0]
    assert (number, len(names)) == (2, 2)


def test_a_sum_that_overflows_is_found(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, None, stop_on_non_finite.StopOnNonFiniteCallback(), max_steps=1)
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    with pytest.raises(
        stop_on_non_finite.NonFiniteGradientError, match="their sum over micro-batches and ranks overflowed"
    ) as caught:
        trainer.train()
    assert caught.value.findings == [[]]


def test_one_wait_for_the_device_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    item = Tensor.item

    def counted(tensor: Tensor) -> Any:
        waits.append(tensor)
        return item(tensor)

    callback = stop_on_non_finite.StopOnNonFiniteCallback()
    trainer = make_trainer(tmp_path, None, callback)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    callback.on_step_begin(trainer.args, trainer.state, trainer.control)
    monkeypatch.setattr(Tensor, "item", counted)
    for name in ("tolist", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, lambda tensor: pytest.fail("waits for the device"))
    trainer.model(torch.ones(2, 4), torch.ones(2, 1))["loss"].backward()
    callback.on_substep_end(trainer.args, trainer.state, trainer.control)
    callback.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=None)
    assert len(waits) == 1
    callback.remove()


def scaled_step(callback: Any, trainer: Any, optimizer: AcceleratedOptimizer, scaler: Any) -> None:
    """Take an fp16 step as Trainer does, with a scaler that works on the CPU."""
    callback.on_step_begin(trainer.args, trainer.state, trainer.control)
    loss = trainer.model(torch.ones(2, 4), torch.ones(2, 1))["loss"]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer.optimizer)
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    arguments = trainer.args, trainer.state, trainer.control
    callback.on_pre_optimizer_step(*arguments, model=trainer.model, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()


def test_a_loss_scaler_may_skip_steps_until_its_scale_is_used_up(tmp_path: Path) -> None:
    callback = stop_on_non_finite.StopOnNonFiniteCallback()
    trainer = make_trainer(tmp_path, {1: float("inf"), 2: float("nan"), 3: float("nan"), 4: float("nan")})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    Accelerator(cpu=True)  # sets the state that the optimizer's wrapper reads
    wrapped = AcceleratedOptimizer(torch.optim.AdamW(trainer.model.parameters()), scaler=scaler)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    scaled_step(callback, trainer, wrapped, scaler)
    assert not wrapped.step_was_skipped
    before = trainer_toys.copies(trainer.model)
    for scale in (4.0, 2.0, 1.0):  # the scale after each step
        scaled_step(callback, trainer, wrapped, scaler)
        assert wrapped.step_was_skipped
        assert scaler.get_scale() == scale
    with pytest.raises(stop_on_non_finite.NonFiniteGradientError):
        scaled_step(callback, trainer, wrapped, scaler)
    assert all(torch.equal(a, b) for a, b in zip(trainer_toys.copies(trainer.model), before, strict=True))


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, None)
    trainer.args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ValueError, match="deepspeed: its engine updates"):
        stop_on_non_finite.StopOnNonFiniteCallback().on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model
        )


def test_sparse_and_complex_gradients() -> None:
    callback = stop_on_non_finite.StopOnNonFiniteCallback()
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding.register_parameter("spectrum", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    arguments: Any = type("Arguments", (), {"deepspeed": None, "device": torch.device("cpu")})
    state: Any = type("State", (), {"global_step": 6})
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        callback.on_train_begin(arguments, state, None, model=embedding)
        callback.on_step_begin(arguments, state, None)
        (embedding(torch.tensor([1, 2])) * embedding.spectrum).abs().sum().backward()
        callback.on_pre_optimizer_step(arguments, state, None, model=embedding, optimizer=None)
        callback.on_step_begin(arguments, state, None)
        (embedding(torch.tensor([3])) * embedding.spectrum * float("inf")).abs().sum().backward()
        with pytest.raises(stop_on_non_finite.NonFiniteGradientError) as caught:
            callback.on_pre_optimizer_step(arguments, state, None, model=embedding, optimizer=None)
    assert sorted(caught.value.findings[0][0][1]) == ["spectrum", "weight"]
