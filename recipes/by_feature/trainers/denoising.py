"""diffusers' models learn to predict noise, as in its train_text_to_image on Accelerate, with activations offloaded.

accelerate launch recipes/by_feature/trainers/denoising.py --model unet    # or dit; needs the extra diffusers
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier  # hf_memopt
from hf_memopt.memory import MemoryLogger  # hf_memopt

LENGTH, WIDTH, NUM_CLASSES = 6, 32, 4  # of a text: tokens and numbers per token; of images: their kinds


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "dit":
        sizes: Any = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "norm_num_groups": 1}
        kinds = {"in_channels": 4, "out_channels": 4, "sample_size": 16, "num_embeds_ada_norm": NUM_CLASSES}
        return DiTTransformer2DModel(**sizes, **kinds)
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": WIDTH}
    return UNet2DConditionModel(16, 4, 4, down_block_types=down, up_block_types=up, **sizes)


def predicted(model: nn.Module, noisy: Tensor, timesteps: Tensor, text: Tensor, kinds: Tensor) -> Tensor:
    if isinstance(model, UNet2DConditionModel):
        return model(noisy, timesteps, text).sample
    return model(noisy, timesteps, class_labels=kinds).sample


def train(name: str, offloader: ActivationOffloader, num_steps: int = 12) -> nn.Module:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = make_model(name).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = DDPMScheduler(num_train_timesteps=1000)
    memory = MemoryLogger(accelerator, log_every=num_steps)  # hf_memopt
    torch.manual_seed(1)
    for step in range(1, num_steps + 1):
        latents = torch.randn(4, 4, 16, 16, device=accelerator.device)
        text, kinds = torch.randn(4, LENGTH, WIDTH).to(latents), torch.randint(NUM_CLASSES, (4,)).to(latents.device)
        noise, timesteps = torch.randn_like(latents), torch.randint(1000, (4,), device=latents.device)
        noisy = schedule.add_noise(latents, noise, timesteps)
        with accelerator.accumulate(model):
            with memory.phase("forward"), offloader.offload_context(model):  # hf_memopt: around forward and loss
                loss = nn.functional.mse_loss(predicted(model, noisy, timesteps, text, kinds).float(), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        memory.log(step)  # hf_memopt
    peak = max(peak.certain_bytes for peak in memory.tracker.peaks.values())
    accelerator.print(f"{name}: loss {loss.item():.3f}, {peak / 2**20:.0f} MiB at most")
    return accelerator.unwrap_model(model)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=["unet", "dit"], default="unet", help="which of diffusers' models")
name = parser.parse_args().model
on_cpu = not torch.accelerator.is_available()
plain = train(name, ActivationOffloader(enabled=False))
# A GPU needs no more than ActivationOffloader(). A CPU moves nothing by itself; this shows the copies of a GPU.
offloader = ActivationOffloader(
    offload_threshold_mb=0.0, mode="all" if on_cpu else "auto", copier=SyncCopier() if on_cpu else None
)
offloaded = train(name, offloader)
print(f"{offloader.stats.bytes_moved / 2**20:.1f} MiB went to host memory and came back")
equal = all(map(torch.equal, plain.parameters(), offloaded.parameters()))
print(f"Weights equal to those without offloading: {equal}")
