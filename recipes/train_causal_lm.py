"""Train a causal language model with its saved activations in host memory.

    accelerate launch recipes/train_causal_lm.py --text_file book.txt --offload auto --output_dir outputs/book
    accelerate launch recipes/train_causal_lm.py --model Qwen/Qwen3-0.6B --dataset roneneldan/TinyStories \\
        --block_size 2048 --per_device_batch_size 4 --gradient_accumulation_steps 4 --budget_gib 6

Without --model a small Qwen3 is made from scratch and trains on a CPU in about two minutes. Without --text_file or
--dataset the text is the documentation that every Python installation carries: the language reference and the
docstrings of the standard library, about 2 MB, under the PSF licence. Nothing is downloaded then.

Devices, processes and mixed precision are accelerate's: `accelerate launch --mixed_precision bf16 ...`. On a CPU
nothing is offloaded unless --cpu_copies asks for the copies. @FILE stands for the flags in a file, one per line.
"""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed, tqdm
from datasets import DatasetDict
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import default_data_collator, get_scheduler

from hf_memopt.checkpoint import endless_batches
from hf_memopt.command_line import one_line_errors
from hf_memopt.memory import MemoryLogger
from hf_memopt.recipes.causal_lm import data as data
from hf_memopt.recipes.causal_lm.model import make_model, make_offloader
from hf_memopt.recipes.common import auto_plan, loop
from hf_memopt.recipes.common import cost as report
from hf_memopt.recipes.common.loop import lock_output, open_checkpoints, record, save_and_stop, set_up_logging
from hf_memopt.recipes.common.options import Options, TrainingOptions, parse
from hf_memopt.training.low_bit import low_bit_adamw

logger = logging.getLogger("hf_memopt.recipes.train_causal_lm")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what is written to `results.json`."""
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    set_up_logging(accelerator)
    lock = lock_output(accelerator, options.training.output_dir)
    with accelerator.main_process_first():  # the others find tokenized datasets in the cache
        texts = data.read_texts(options.data)
        tokenizer = data.make_tokenizer(options.model, texts)
        blocks = data.pack(texts, tokenizer, options.data, options.training.seed)
    logger.info(
        f"Data: {data.describe_corpus(options.data)}; {len(blocks['train']):,} blocks of {options.data.block_size} "
        f"tokens and {len(blocks['test']):,} held out, vocabulary {len(tokenizer):,}"
    )
    options, accelerator, predicted = auto_plan.applied(
        options, accelerator, lambda precision: workload(options, tokenizer, precision), make_accelerator
    )
    with logging_redirect_tqdm():
        costs = [measure(mode, options, tokenizer, blocks) for mode in options.offload.compared_modes]
        if options.training.loop == "trainer":
            from hf_memopt.recipes.causal_lm.trainer import train_with_trainer

            results = train_with_trainer(options, tokenizer, blocks)
        else:
            results = train(prepare(accelerator, options.offload.offload, options, tokenizer, blocks), options)
    results["compared_costs"] = costs
    auto_plan.compare(predicted, accelerator)
    report.explain_idleness(results, options.offload)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(options.training.output_dir)
        report.write(results, Path(options.training.output_dir))
        logger.info("\n" + report.table(results))
    lock.release()
    accelerator.end_training()
    return results


def workload(options: Options, tokenizer: Any, precision: str) -> auto_plan.RecipeWorkload:
    """What `--plan` simulates; its module runs the functions of this one."""
    from hf_memopt.recipes.causal_lm.plan import CausalLM

    return CausalLM(options, tokenizer, precision=precision)


def make_accelerator(options: Options) -> Accelerator:
    # Windows run across the ends of epochs, so that every update is made of equally many blocks.
    windows = GradientAccumulationPlugin(
        num_steps=options.training.gradient_accumulation_steps, sync_with_dataloader=False
    )
    return loop.make_accelerator(options.training, gradient_accumulation_plugin=windows)


@dataclass(kw_only=True)
class Run(loop.Run):
    """What accelerate prepared, the offloader, and what an update and an evaluation need besides."""

    held_out: DataLoader[Any]
    max_grad_norm: float
    memory: MemoryLogger


def prepare(accelerator: Accelerator, mode: str, options: Options, tokenizer: Any, blocks: DatasetDict) -> Run:
    """Model, optimizer, schedule and batches, the same for every call.

    Raises:
        ValueError: there are fewer blocks than one batch of all processes needs.
    """
    training = options.training
    num_blocks = training.per_device_batch_size * accelerator.num_processes
    if num_blocks > len(blocks["train"]):
        raise ValueError(
            f"per_device_batch_size={training.per_device_batch_size}: a batch of all processes needs {num_blocks} "
            f"blocks, and there are {len(blocks['train'])}; use smaller batches, shorter blocks or more text"
        )
    set_seed(training.seed)
    model = make_model(options.model, tokenizer, options.data.block_size)
    optimizer = make_optimizer(model, training, accelerator.device)
    # accelerate steps the schedule once per process.
    scheduler = get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=training.warmup_steps * accelerator.num_processes,
        num_training_steps=training.max_steps * accelerator.num_processes,
    )
    loader = {"batch_size": training.per_device_batch_size, "collate_fn": default_data_collator}
    # A generator of its own keeps the loader from drawing from the one that dropout uses, so that resuming is exact.
    batches = DataLoader(blocks["train"], shuffle=True, drop_last=True, generator=torch.Generator(), **loader)
    held_out = DataLoader(blocks["test"], generator=torch.Generator(), **loader)
    model, optimizer, scheduler, batches, held_out = accelerator.prepare(model, optimizer, scheduler, batches, held_out)
    return Run(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        offloader=make_offloader(mode, options.offload, accelerator.device),
        mode=mode,
        held_out=held_out,
        max_grad_norm=training.max_grad_norm,
        memory=MemoryLogger(accelerator, log_every=training.log_every, output_dir=training.output_dir),
    )


def make_optimizer(model: nn.Module, training: TrainingOptions, device: torch.device) -> torch.optim.Optimizer:
    """AdamW. On an accelerator the fused one: the other's temporaries are as large as the weights."""
    settings: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer_bits != 32:
        optimizer: torch.optim.Optimizer = low_bit_adamw(training.optimizer_bits)(model.parameters(), **settings)
        return optimizer
    return torch.optim.AdamW(model.parameters(), fused=True if device.type != "cpu" else None, **settings)


def update(run: Run, batches: Iterator[dict[str, Tensor]]) -> Tensor:
    """One update of the weights; returns the mean loss of this process's batches, on the device."""
    num_batches = run.accelerator.gradient_accumulation_steps
    losses = []
    for _ in range(num_batches):
        batch = next(batches)
        with run.accelerator.accumulate(run.model):
            with run.memory.phase("forward"), run.saving():
                loss = run.model(**batch, labels=batch["input_ids"]).loss
            with run.memory.phase("backward"):
                run.accelerator.backward(loss)
            with run.memory.phase("optimizer"):
                if run.accelerator.sync_gradients:
                    run.accelerator.clip_grad_norm_(run.model.parameters(), run.max_grad_norm)
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
        losses.append(loss.detach())
    run.progress.num_updates += 1
    return torch.stack(losses).mean()


def evaluate(run: Run) -> dict[str, float]:
    """Mean loss per token of the held-out blocks, and its exponential."""
    run.model.eval()
    losses = []
    with torch.no_grad():
        for batch in run.held_out:
            loss = run.model(**batch, labels=batch["input_ids"]).loss
            losses.append(run.accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    run.model.train()
    eval_loss = torch.cat(losses).mean().item()
    return {"eval_loss": eval_loss, "perplexity": math.exp(eval_loss)}


def train(run: Run, options: Options) -> dict[str, Any]:
    """The training loop: updates, log lines, evaluations, checkpoints; the model is saved at the end."""
    training, accelerator = options.training, run.accelerator
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    report.announce(run.mode, num_parameters, options, accelerator)
    accelerator.init_trackers("causal_lm", config=options.settings)
    checkpoints = open_checkpoints(run, training)
    progress = run.progress
    run.model.train()
    batches = endless_batches(accelerator, run.batches, progress.num_updates * training.gradient_accumulation_steps)
    meter = report.Meter(run.mode, accelerator.device, run.offloader)
    bar = tqdm(total=training.max_steps, initial=progress.num_updates, unit="update", desc="Training")
    with bar, checkpoints.stopping_on_signal():
        while progress.num_updates < training.max_steps:
            meter.begin()
            loss = update(run, batches)
            meter.end()
            bar.update()
            log_and_evaluate(run, loss, training)
            if save_and_stop(run, checkpoints, training.checkpointing_steps):
                break
    save_model(run, training.output_dir)
    return report.results(options, accelerator, progress.history, meter.cost())


def log_and_evaluate(run: Run, loss: Tensor, training: TrainingOptions) -> None:
    """What is due after this update: memory, mean loss, held-out loss."""
    num_updates = run.progress.num_updates
    run.memory.log(num_updates)
    if due(num_updates, training.log_every, training.max_steps):
        mean_loss = run.accelerator.reduce(loss, "mean").item()
        record(run, "update", num_updates, {"loss": mean_loss, "learning_rate": run.scheduler.get_last_lr()[0]})
    if due(num_updates, training.eval_every, training.max_steps):
        record(run, "update", num_updates, evaluate(run))


def due(num_updates: int, every: int, last: int) -> bool:
    return num_updates % every == 0 or num_updates == last


def save_model(run: Run, folder: str) -> None:
    run.accelerator.wait_for_everyone()
    run.accelerator.unwrap_model(run.model).save_pretrained(
        folder,
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
        state_dict=run.accelerator.get_state_dict(run.model),
    )


def measure(mode: str, options: Options, tokenizer: Any, blocks: DatasetDict) -> report.Cost:
    """A short run of its own in one mode: the same weights and batches each time."""
    constant = replace(options.training, lr_scheduler_type="constant", max_steps=options.offload.compare_steps)
    options = options._replace(training=constant)
    run = prepare(make_accelerator(options), mode, options, tokenizer, blocks)
    batches = endless_batches(run.accelerator, run.batches)
    return loop.measure(run, lambda: update(run, batches), options.offload)


if __name__ == "__main__":
    sys.exit(one_line_errors("train_causal_lm", main))
