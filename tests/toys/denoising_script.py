"""A script like those of diffusers for training, with the flags that they share; `denoiser` beside it has its model."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel
from torch.utils.data import DataLoader

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resolution", type=int, required=True)
    parser.add_argument("--train_batch_size", type=int, required=True)
    parser.add_argument("--gradient_accumulation_steps", type=int, required=True)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], required=True)
    parser.add_argument("--max_grad_norm", type=float, required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--use_8bit_adam", action="store_true")
    flags = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=flags.gradient_accumulation_steps, mixed_precision=flags.mixed_precision
    )
    folder = Path(__file__).with_name("denoiser")
    model = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(str(folder)))
    if flags.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    latents = DataLoader(torch.randn(8, 4, 8, 8), batch_size=flags.train_batch_size)
    model, optimizer, latents = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), latents)
    for batch in latents:
        with accelerator.accumulate(model):
            moments, text = torch.full((len(batch),), 10), torch.zeros(len(batch), 77, 16)
            accelerator.backward((model(batch, moments, text).sample - batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), flags.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained("trained")
