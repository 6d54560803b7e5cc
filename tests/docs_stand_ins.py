"""Small models, data and settings for the names that the documentation's blocks take for given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt import ActivationOffloader

coupling_toys = LateModule("coupling_toys")

VOCABULARY, LENGTH, NUM_SAMPLES = 32, 16, 8


class Toys:
    """Makes each stand-in once, on demand; `page` chooses where pages differ."""

    def __init__(self, page: str) -> None:
        torch.manual_seed(0)
        self._made: dict[str, Any] = {}
        self._makes = ALL | PAGES.get(page, {})

    def replace(self, makes: dict[str, Callable[["Toys"], Any]]) -> None:
        """Make some names otherwise from now on."""
        self._makes |= makes

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makes[name](self)
        return self._made[name]


def causal_lm(toys: Toys) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).train()


def model_folder(toys: Toys) -> str:
    toys["model"].save_pretrained("model")
    return "model"


def samples(toys: Toys) -> list[dict[str, Tensor]]:
    found = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH))
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def batches(toys: Toys) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (3, 4, LENGTH))
    return [{"input_ids": each, "labels": each} for each in tokens]


def accelerator(toys: Toys) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def arguments(toys: Toys) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        "run", max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
    )


def trainer(toys: Toys) -> Any:
    from transformers import Trainer

    return Trainer(toys["model"], toys["args"], train_dataset=toys["dataset"])


def dpo_trainer(toys: Toys) -> Any:
    from hf_memopt.recipes.by_feature.trainers.dpo import make_trainer

    return make_trainer("run")


def step(toys: Toys) -> Callable[[], None]:
    def run() -> None:
        toys["model"](torch.randn(64, 8)).square().mean().backward()
        toys["optimizer"].zero_grad()

    return run


def two_layers(toys: Toys) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def fno(toys: Toys) -> Any:
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)


def data_processor(toys: Toys) -> Any:
    from neuralop.data.transforms.data_processors import DefaultDataProcessor

    return DefaultDataProcessor()


def grids(toys: Toys) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader([{"x": torch.randn(1, 8, 8), "y": torch.randn(1, 8, 8)} for _ in range(4)], batch_size=2)


def l2loss(toys: Toys) -> Any:
    from neuralop import LpLoss

    return LpLoss(d=2)


def lora(toys: Toys) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(causal_lm(toys), LoraConfig(target_modules=["q_proj"]))


class Convolution(nn.Conv2d):
    """The stand-in for `MyModel`."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3)


def mean_loss(model: nn.Module, micro_batch: Any) -> Tensor:
    return model(**micro_batch).loss


def contrastive(outputs: Tensor) -> Tensor:
    return outputs.std(dim=0).mean()


class Block(nn.Linear):
    """A block that takes a mask."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(hidden)


ALL: dict[str, Callable[[Toys], Any]] = {
    "accelerator": accelerator,
    "args": arguments,
    "batch": lambda toys: toys["batches"][0],
    "batches": batches,
    "data": lambda toys: toys["batches"],
    "dataset": samples,
    "device": lambda toys: torch.device("cpu"),
    "ema": lambda toys: nn.Linear(2, 2),
    "loss_fn": lambda toys: mean_loss,
    "model": causal_lm,
    "num_epochs": lambda toys: 1,
    "num_steps": lambda toys: 2,
    "offloader": lambda toys: ActivationOffloader(),
    "optimizer": lambda toys: torch.optim.SGD(toys["model"].parameters(), lr=1e-3),
    "output_dir": lambda toys: Path(),
    "samples": samples,
    "scheduler": lambda toys: torch.optim.lr_scheduler.StepLR(toys["optimizer"], 5),
    "trainer": trainer,
    "windows": lambda toys: [toys["batches"]],
}


def embedder(toys: Toys) -> Any:
    from sentence_toys import make_model

    return make_model(Path(), 0.0)


def coupling_folder(toys: Toys) -> str:
    coupling_toys.write(Path("couplings"))
    return "couplings"


_LAYERS = {"model": two_layers}
PAGES: dict[str, dict[str, Callable[[Toys], Any]]] = {
    "couplings": {"folder": coupling_folder},
    "estimating": {"MyModel": lambda toys: Convolution, "folder": model_folder},
    "fluxflow": {
        "images": lambda toys: torch.randn(2, 3, 8, 8),
        "autocast": lambda toys: lambda: torch.autocast("cpu", enabled=False),
        "discriminator": lambda toys: nn.Conv2d(3, 1, 3),
        "gamma": lambda toys: 1.0,
    },
    "leaks": {
        **_LAYERS,
        "step": step,
        "batch": lambda toys: lambda: torch.randn(64, 8),
        "losses": lambda toys: [],
    },
    "neural_operators": {
        "model": fno,
        "data_processor": data_processor,
        "train_loader": grids,
        "test_loaders": lambda toys: {},
        "l2loss": l2loss,
    },
    "selective_checkpointing": {
        "block": lambda toys: Block(4, 4),
        "hidden": lambda toys: torch.randn(2, 4, requires_grad=True),
        "mask": lambda toys: None,
    },
    "streamed_weights": {
        "model": lora,
        "optimizer": lambda toys: torch.optim.SGD(
            [each for each in toys["model"].parameters() if each.requires_grad], lr=1e-3
        ),
    },
    "teacher_offloading": {
        "batches": lambda toys: [torch.randn(4, 8)] * 2,
        "batch": lambda toys: torch.randint(VOCABULARY, (2, LENGTH)),
        "teacher_model": two_layers,
        "student": two_layers,
        "optimizer": lambda toys: torch.optim.SGD(toys["student"].parameters(), lr=1e-3),
    },
    "trainer": {"embedder": embedder},
    "training_step": {
        "optimizer": lambda toys: toys["accelerator"].prepare(torch.optim.SGD(toys["model"].parameters(), lr=1e-3)),
        "contrastive": lambda toys: contrastive,
        "contrastive_loss": lambda toys: contrastive,
        "micro_batches": lambda toys: list(torch.randn(2, 4, 8)),
    },
    "verify": {**_LAYERS, "batch": lambda toys: torch.randn(4, 8)},
}
