"""Training scripts of many kinds, small and unaware of this library, for `benchmarks.limit.fit_table`.

    python -m benchmarks.limit.fit_programs NAME --steps 3

Each prints the memory that the process has taken once its libraries are imported, and at its end the digest of all
weights and the CPU time.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.limit.printed import show_end, show_rest

PROGRAMS: dict[str, Callable[[int, Path], Iterable[nn.Module]]] = {}
WORDS = 4000


def program(run: Callable[[int, Path], Iterable[nn.Module]]) -> Callable[[int, Path], Iterable[nn.Module]]:
    PROGRAMS[run.__name__] = run
    return run


def llama(layers: int = 6, width: int = 768) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            vocab_size=WORDS,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )


def adapted(model: nn.Module, rank: int = 8) -> Any:
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))


def tokens(count: int, length: int) -> Tensor:
    return torch.randint(3, WORDS, (count, length), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, rows: list[dict[str, Any]], steps: int, folder: Path, **arguments: Any) -> list[nn.Module]:
    trainer = Trainer(model, TrainingArguments(**_arguments(steps, folder, arguments)), train_dataset=rows)
    trainer.train()
    return [model]


def _arguments(steps: int, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    always = {"max_steps": steps, "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False}
    return {"output_dir": str(folder), "per_device_train_batch_size": 2, "disable_tqdm": True} | always | arguments


def rows_of(ids: Tensor) -> list[dict[str, Any]]:
    return [{"input_ids": each, "labels": each} for each in ids]


@program
def trainer_full(steps: int, folder: Path) -> Iterable[nn.Module]:
    return train(llama(), rows_of(tokens(64, 256)), steps, folder)


@program
def trainer_accumulation(steps: int, folder: Path) -> Iterable[nn.Module]:
    return train(llama(), rows_of(tokens(64, 256)), steps, folder, gradient_accumulation_steps=2, max_grad_norm=0.5)


@program
def trainer_checkpointing(steps: int, folder: Path) -> Iterable[nn.Module]:
    return train(llama(), rows_of(tokens(64, 512)), steps, folder, gradient_checkpointing=True)


@program
def trainer_sgd(steps: int, folder: Path) -> Iterable[nn.Module]:
    return train(llama(), rows_of(tokens(64, 512)), steps, folder, optim="sgd")


@program
def trainer_bf16(steps: int, folder: Path) -> Iterable[nn.Module]:
    return train(llama(4), rows_of(tokens(64, 48)), steps, folder, bf16=True)


@program
def trainer_lora(steps: int, folder: Path) -> Iterable[nn.Module]:
    return train(adapted(llama(8)), rows_of(tokens(64, 512)), steps, folder)


@program
def trainer_lora_saved(steps: int, folder: Path) -> Iterable[nn.Module]:
    llama(8).to(torch.bfloat16).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return train(adapted(model), rows_of(tokens(64, 512)), steps, folder)


@program
def trainer_saved(steps: int, folder: Path) -> Iterable[nn.Module]:
    llama(4).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    return train(model, rows_of(tokens(64, 256)), steps, folder)


@program
def trainer_bert(steps: int, folder: Path) -> Iterable[nn.Module]:
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, hidden_size=512, num_hidden_layers=8, num_attention_heads=8))
    return train(model, rows_of(tokens(64, 256)), steps, folder)


@program
def trainer_t5(steps: int, folder: Path) -> Iterable[nn.Module]:
    config = T5Config(vocab_size=WORDS, d_model=512, d_ff=2048, num_layers=4, decoder_start_token_id=0)
    return train(T5ForConditionalGeneration(config), rows_of(tokens(64, 256)), steps, folder)


@program
def trainer_vit(steps: int, folder: Path) -> Iterable[nn.Module]:
    config = ViTConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=6)
    images = torch.randn(16, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    rows = [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images)]
    return train(ViTForImageClassification(config), rows, steps, folder, per_device_train_batch_size=4)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(count: int, length: int) -> list[str]:
    return [" ".join(f"w{number}" for number in row) for row in tokens(count, length).tolist()]


@program
def trl_sft(steps: int, folder: Path) -> Iterable[nn.Module]:
    from trl import SFTConfig, SFTTrainer

    model, data = llama(), Dataset.from_dict({"text": texts(64, 250)})
    trainer = SFTTrainer(
        model, SFTConfig(**_arguments(steps, folder, {})), train_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    return [model]


@program
def trl_sft_lora(steps: int, folder: Path) -> Iterable[nn.Module]:
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": texts(64, 500)})
    trainer = SFTTrainer(
        llama(8),
        SFTConfig(**_arguments(steps, folder, {"gradient_checkpointing": False})),
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8),
    )
    trainer.train()
    return [trainer.model]


@program
def trl_dpo(steps: int, folder: Path) -> Iterable[nn.Module]:
    from trl import DPOConfig, DPOTrainer

    said = texts(96, 100)
    data = Dataset.from_dict({"prompt": said[:32], "chosen": said[32:64], "rejected": said[64:]})
    llama(4).save_pretrained(folder / "base")
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    trainer = DPOTrainer(
        model, None, DPOConfig(**_arguments(steps, folder, {})), train_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    return [model]


def loop(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    accumulation: int = 1,
    make: Callable[..., Any] = torch.optim.AdamW,
) -> list[nn.Module]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    optimizer = make(model.parameters(), lr=1e-3)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss(prepared, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [model]


@program
def loop_gpt2(steps: int, folder: Path) -> Iterable[nn.Module]:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=512, n_layer=8, n_head=8))
    batches = tokens(2 * steps, 512).split(2)
    return loop(model, batches, lambda model, ids: model(input_ids=ids, labels=ids).loss)


@program
def loop_accumulation(steps: int, folder: Path) -> Iterable[nn.Module]:
    batches = tokens(4 * steps, 256).split(2)
    return loop(llama(), batches, lambda model, ids: model(input_ids=ids, labels=ids).loss, accumulation=2)


@program
def loop_lstm(steps: int, folder: Path) -> Iterable[nn.Module]:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, 512)
            self.cells = nn.LSTM(512, 768, num_layers=3, batch_first=True, dropout=0.1)
            self.head = nn.Linear(768, WORDS)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.head(self.cells(self.table(ids))[0])
            return found

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return loop(Words(), tokens(8 * steps, 128).split(8), loss)


@program
def loop_unet(steps: int, folder: Path) -> Iterable[nn.Module]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64,
        block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )
    batches = torch.randn(steps, 4, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        return functional.mse_loss(model(images + noise, torch.randint(1000, (len(images),))).sample, noise)

    return loop(model, batches, loss)


@program
def loop_fno(steps: int, folder: Path) -> Iterable[nn.Module]:
    from neuralop.models import FNO

    model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=48, n_layers=8)
    batches = torch.randn(steps, 2, 1, 160, 160, generator=torch.Generator().manual_seed(1))
    return loop(model, batches, lambda model, x: functional.mse_loss(model(x), x.roll(1, -1)))


@program
def loop_convolutions(steps: int, folder: Path) -> Iterable[nn.Module]:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    model = nn.Sequential(*block(3, 48), *(each for _ in range(6) for each in block(48, 48)), nn.Conv2d(48, 3, 1))
    batches = torch.randn(steps, 2, 3, 192, 192, generator=torch.Generator().manual_seed(1))
    return loop(model, batches, lambda model, x: functional.mse_loss(model(x), x.flip(-1)), make=torch.optim.RAdam)


@program
def recipe_lgt(steps: int, folder: Path) -> Iterable[nn.Module]:
    from hf_memopt.recipes.train_lgt import main

    settings = {
        "checkpoint.save_dir": folder / "out",
        "model.base_channels": 32,
        "training.batch_size": 4,
        "training.num_epochs": steps,
        "data.num_generated": 8,
        "inference.num_panels": 1,
        "inference.num_steps": 2,
        "training.ode_integration_steps": 6,
    }
    main([word for name, value in settings.items() for word in (f"--{name}", str(value))])
    return []


@program
def recipe_fluxflow(steps: int, folder: Path) -> Iterable[nn.Module]:
    from hf_memopt.recipes.train_fluxflow import main

    settings = {"output_dir": folder / "out", "max_steps": steps, "resolution": 160, "num_drawn": 16, "offload": "off"}
    main([word for name, value in settings.items() for word in (f"--{name}", str(value))])
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=3, help="updates (default: %(default)s)")
    options = parser.parse_args()
    set_seed(0)
    begun_s = show_rest()
    with tempfile.TemporaryDirectory() as folder:
        models = PROGRAMS[options.name](options.steps, Path(folder))
        show_end(models, begun_s, (Path(folder) / "out").rglob("*.safetensors"))


if __name__ == "__main__":
    sys.exit(main())
