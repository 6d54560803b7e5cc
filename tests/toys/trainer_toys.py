"""A model, settings, callbacks and a trainer that leaks, for tests inside Trainer."""

from typing import Any

import torch
from offload_trainers import examples
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

# A step is two micro-batches of two samples; nothing is reported or saved.
SETTINGS: dict[str, Any] = {
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
}


class Regression(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, num_inputs: int = 8, width: int = 16, num_outputs: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(num_inputs, width)
        self.down = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.down(torch.dropout(self.up(x).relu(), 0.1, self.training))
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


class LeakyTrainer(Trainer):
    """A trainer that keeps every loss with its graph, whose nodes hold activations without a backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Tensor] = []

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        self.kept.append(model(**inputs)["loss"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class KeptPerEpoch(TrainerCallback):
    """Keeps tensors on purpose, as a user does."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self.kept.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


class Snapshots(TrainerCallback):
    """The parameters after each step."""

    def __init__(self) -> None:
        self.after: list[list[Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self.after.append(copies(model))


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class EventRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.events.append(name)
        return super().__getattribute__(name)


class FirstRecorder(EventRecorder):
    pass


class FailsOnce(TrainerCallback):
    """Fails after the first micro-batch of the second step."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._errors and state.global_step == 1:
            raise self._errors.pop()


class Events(TrainerCallback):
    """Adds to `events` at training's begin and end, and keeps the models that it is shown."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.models: list[nn.Module] = []

    def on_train_begin(self, *event: Any, model: nn.Module, **kwargs: Any) -> None:
        self.events.append("begin")
        self.models.append(model)

    def on_train_end(self, *event: Any, **kwargs: Any) -> None:
        self.events.append("end")


class GenerateAtEvaluation(TrainerCallback):
    """Keeps the model's text after each evaluation."""

    def __init__(self) -> None:
        self.generated: list[list[int]] = []

    def on_evaluate(self, *event: Any, model: Any, **kwargs: Any) -> None:
        prompt = examples()[0]["input_ids"][None, :4]
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        self.generated.append(output[0].tolist())
