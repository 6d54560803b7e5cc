"""Train an image autoencoder as a VAE-GAN with LPIPS, in memory that does not grow.

    accelerate launch -m hf_memopt.recipes.train_fluxflow --output_dir outputs/shapes
    accelerate launch --mixed_precision bf16 -m hf_memopt.recipes.train_fluxflow --image_folder photos \\
        --resolution 512 --resolutions 512 256 --aspect_ratios 0.75 1 1.33 --channels 64 128 256 256 \\
        --checkpoint_vae --ema_on_cpu --expandable_segments --num_workers 4 --output_dir outputs/photos

The VAE is diffusers' AutoencoderKL. Each batch is trained on `training_steps` times at each of the resolutions: one
update of the discriminator and one of the VAE each time, and one global step for all of them.

Without --image_folder or --dataset images are drawn, and a CPU trains in minutes; nothing is downloaded then. Devices,
processes and bfloat16 are accelerate's. On a CPU nothing is offloaded unless --disk names a folder to move it to, or
--cpu_copies asks for the copies of a GPU. --config_path FILE reads any flags from YAML or JSON.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from hf_memopt.command_line import one_line_errors, script_imports
from hf_memopt.memory import LeakMonitor, MemoryLogger
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.common.auto_plan import train_within_memory
from hf_memopt.recipes.common.results import RunCost

with script_imports("train_fluxflow", __name__):
    from hf_memopt.recipes.fluxflow import data as data
    from hf_memopt.recipes.fluxflow import report as report
    from hf_memopt.recipes.fluxflow.model import build_models, make_average, save_vae, stride, use_expandable_segments
    from hf_memopt.recipes.fluxflow.options import Options, parse
    from hf_memopt.recipes.fluxflow.step import Figures, OfBoth, Run, make_optimizers, step, weights_at
    from hf_memopt.recipes.fluxflow.workload import FluxFlow

logger = logging.getLogger("hf_memopt.recipes.train_fluxflow")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    output = Path(options.training.output_dir)
    with loop.writing_to(output, accelerator):
        begin = options, accelerator, partial(FluxFlow, options), make_accelerator
        run, cost = train_within_memory(*begin, lambda *given: train(prepare(*given)))
        results: dict[str, Any] = {}
        if accelerator.is_main_process:
            save_vae(accelerator.unwrap_model(run.model.vae), run.average, output)
        with loop.reporting(output):
            results = report.results(run, cost)
            if accelerator.is_main_process:
                images = data.panel_images(run.source, options.data, options.training.seed)
                report.write(results, report.panels(run, images), output)
    run.accelerator.end_training()
    return results


def make_accelerator(options: Options) -> Accelerator:
    if options.levers.expandable_segments:
        use_expandable_segments()
    accelerator = loop.make_accelerator(options.training, options.training.output_dir)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision={accelerator.mixed_precision!r} is not for this recipe; use bf16 or no")
    return accelerator


def load(options: Options) -> tuple[()]:
    """Load nothing: `prepare` opens the images, whose sizes are multiples of the VAE's stride."""
    return ()


def prepare(accelerator: Accelerator, options: Options) -> Run:
    """Return models, optimizers, schedules and batches, the same for every call."""
    training = options.training
    set_seed(training.seed)  # the same weights on all processes
    models = build_models(options.model, options.losses, options.levers, training.seed)
    data.check_sizes(options, stride(models.vae))
    if models.perceptual is not None:
        models.perceptual.to(accelerator.device)
    # Losses differentiate parts of the VAE one by one, which DDP does not see; `average_gradients` exchanges them.
    models = models._replace(
        vae=accelerator.prepare_model(models.vae, evaluation_mode=True),
        discriminator=accelerator.prepare_model(models.discriminator, evaluation_mode=True),
    )
    memory = MemoryLogger(accelerator, log_every=training.log_every, output_dir=training.output_dir)
    optimizers = make_optimizers(models, training, accelerator)
    schedulers = [
        # Of torch's optimizers: accelerate does not step these schedules, and so not once per process.
        loop.make_schedule(each.optimizer, training, training.max_steps, 1)
        for each in optimizers
    ]
    source = data.load(options.data, stride(models.vae), training.seed, models.vae.config.in_channels)
    loader = data.make_loader(
        source, options.data, training.batch_size, training.seed, accelerator.process_index, accelerator.num_processes
    )
    average = make_average(models.vae, options, accelerator.device)
    accelerator.register_for_checkpointing(*schedulers, *([average] if average else []))
    # All that has to be the same on all processes is made.
    set_seed(training.seed, device_specific=True)  # other latents on each process
    batches = data.EndlessBatches(loader)
    prepared = accelerator, options, models, optimizers, schedulers, batches
    run = Run(*prepared, average=average, source=source, memory=memory)
    run.finite = OfBoth(*map(run.finite_check, (models.vae, models.discriminator), optimizers))
    return run


def train_batch(run: Run, images: Tensor) -> Figures:
    """Make one global step: `training_steps` times the updates at each resolution. Return the last ones' losses.

    R1 is due at every `r1_interval`-th update of the discriminator, so that its rate does not depend on how many
    updates a batch makes.
    """
    options, progress = run.options, run.progress
    weights = weights_at(progress.num_updates, options.losses)
    images = images.to(run.accelerator.device, non_blocking=True)
    figures: Figures = {}
    for _ in range(options.training.training_steps):
        for resolution in options.resolutions:
            scaled = data.rescaled(images, resolution / options.data.resolution, stride(run.model.vae))
            with_r1 = progress.num_discriminator_updates % options.losses.r1_interval == 0
            figures |= step(run, scaled, weights, with_r1=with_r1)
            progress.num_discriminator_updates += 1
            if run.average is not None:
                with run.memory.phase("average"):
                    run.average.step()
    for scheduler in run.scheduler:
        scheduler.step()
    progress.num_updates += 1
    return figures


def train(run: Run) -> tuple[Run, RunCost]:
    options, training = run.options, run.options.training
    report.announce(run.model, options, run.accelerator, data.describe(options.data))
    resumed = training.resume_from_checkpoint
    run.begin("fluxflow", training.checkpoints_total_limit, resumed)
    progress = run.progress
    if progress.num_updates >= training.max_steps:
        raise ValueError(f"max_steps={training.max_steps}: {resumed} has {progress.num_updates}; use more")
    checkpointing = "" if options.levers.checkpoint_vae else "--checkpoint_vae"
    watch = None if training.detect_leaks == "off" else LeakMonitor(action=training.detect_leaks)
    with run.updates(training.max_steps, checkpointing, unit="step"):
        for images in run.batches:
            with run.timed_update():
                figures = train_batch(run, images)
            # Only now is the step whole: an error within it leaves the position before it for the checkpoint.
            run.place = run.batches.position
            run.memory.log(progress.num_updates)
            at_end = progress.num_updates == training.max_steps
            if at_end or loop.is_due(progress.num_updates, training.log_every):
                record(run, figures)
            if watch is not None:
                watch.step()
            due = loop.is_due(progress.num_updates, training.checkpointing_steps)
            if run.save_and_stop(due=due) or at_end:
                break
    return run, run.end()


def record(run: Run, figures: Figures) -> None:
    names = sorted(figures)
    means = run.accelerator.reduce(torch.stack([figures[name].float() for name in names]), "mean").tolist()
    entry = dict(zip(names, means, strict=True)) | {"learning_rate": run.scheduler[0].get_last_lr()[0]}
    loop.record(run, "step", run.progress.num_updates, entry)


def losses(run: Run) -> Iterator[Tensor]:
    """Return the losses of endless updates, for `hf-memopt compare`."""
    return (torch.stack(list(train_batch(run, images).values())).sum() for images in run.batches)


if __name__ == "__main__":
    sys.exit(one_line_errors("train_fluxflow", main))
