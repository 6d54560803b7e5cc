"""Reflow for image models: a student learns to make in one step the image for which its teacher takes twenty.

accelerate launch recipes/by_feature/image_reflow.py    # needs the extra diffusers
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy

import torch
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, OffloadedTeacher, SyncCopier  # hf_memopt
from hf_memopt.reflow import interpolate, velocity_target  # hf_memopt: times and signs as in diffusers

Batch = tuple[Tensor, ...]  # noise and images, (batch, 3, SIZE, SIZE), and their prompts, (batch, 4, WIDTH)
SIZE, WIDTH, BATCH, NUM_STEPS = 16, 64, 32, 20
PROMPTS = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))  # encoded: "small disc", "large disc"
accelerator = Accelerator()


def draw(num: int) -> Batch:
    """Return discs of any colour in any place, and noise that is independent of them."""
    kinds, colours, centres = torch.randint(2, (num,)), torch.rand(num, 3, 1, 1), torch.rand(2, num, 1, 1)
    across, down = torch.arange(SIZE) - (0.3 + 0.4 * centres) * SIZE
    images = (2 * colours - 1) * (3 + 2 * kinds.view(-1, 1, 1) - across.hypot(down.mT)).clamp(0, 1)[:, None]
    return tuple(each.to(accelerator.device) for each in (torch.randn(images.shape), images, PROMPTS[kinds]))


@torch.no_grad()
def generate(model: nn.Module, images: Tensor, prompts: Tensor, num_steps: int) -> Tensor:
    schedule = FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(sigmas=[1 - step / num_steps for step in range(num_steps)], device=images.device)
    for time in schedule.timesteps:
        velocity = model(images, prompts, prompts.mean(1), time.expand(len(images))).sample
        images = schedule.step(velocity, time, images).prev_sample
    return images


def couplings(teacher: OffloadedTeacher) -> Iterator[Batch]:
    for _ in range(25):
        noise, _, prompts = draw(BATCH)
        with teacher.onload() as model:  # hf_memopt: the weights are on the device here, not while the student trains
            images = generate(model, noise, prompts, NUM_STEPS)
        yield from 4 * [(noise, images, prompts)]  # the student sees each at four times


def train(model: nn.Module, batches: Iterable[Batch], offloader: ActivationOffloader) -> nn.Module:
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    for noise, images, prompts in batches:
        time = torch.rand(len(noise)).to(noise)
        with offloader.offload_context(model):  # hf_memopt: around the forward pass and the loss
            velocity = model(interpolate(noise, images, time), prompts, prompts.mean(1), 1000 * time).sample
            loss = (velocity - velocity_target(noise, images)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False)


torch.manual_seed(accelerator.process_index)
sizes = {"patch_size": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "pos_embed_max_size": 4}
sizes |= dict.fromkeys(["joint_attention_dim", "pooled_projection_dim", "caption_projection_dim"], WIDTH)
untrained = SD3Transformer2DModel(SIZE, in_channels=3, out_channels=3, **sizes)
trained = train(untrained, (draw(BATCH) for _ in range(400)), ActivationOffloader(enabled=False)).cpu()
students, copier = [], SyncCopier() if accelerator.device.type == "cpu" else None  # to try it on a CPU
for offloads in (False, True):
    teacher = OffloadedTeacher(deepcopy(trained), device=accelerator.device, mode="swap" if offloads else "resident")
    offloader = ActivationOffloader(enabled=offloads, mode="all", offload_threshold_mb=0.05, copier=copier)
    torch.manual_seed(accelerator.process_index)
    students.append(train(deepcopy(trained), couplings(teacher), offloader))
noise, _, prompts = draw(256)
with teacher.onload() as model:
    many, one = (generate(model, noise, prompts, num_steps) for num_steps in (NUM_STEPS, 1))
own, learned = ((x - many).square().mean() for x in (one, generate(students[1], noise, prompts, 1)))
accelerator.print(f"Error of one step: the teacher's {own:.4f}, the student's {learned:.4f}, {learned / own:.0%} of it")
accelerator.print(f"{offloader.stats.bytes_moved / 2**20:.0f} MiB went to host memory and back\n{teacher.report()}")
equal = all(map(torch.equal, *map(nn.Module.parameters, students)))
accelerator.print(f"Weights equal to those without offloading: {equal}")
