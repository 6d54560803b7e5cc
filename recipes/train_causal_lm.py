"""Train a causal language model with its saved activations in host memory.

    accelerate launch recipes/train_causal_lm.py --text_file book.txt --offload auto --output_dir outputs/book
    accelerate launch recipes/train_causal_lm.py --model Qwen/Qwen3-0.6B --dataset roneneldan/TinyStories \\
        --block_size 2048 --per_device_batch_size 4 --gradient_accumulation_steps 4 --budget_gib 6

Without --model a small Qwen3 is made from scratch and trains on a CPU in about two minutes. Without --text_file or
--dataset the text is the documentation that every Python installation carries: the language reference and the
docstrings of the standard library, about 2 MB, under the PSF licence. Nothing is downloaded then.

Devices, processes and mixed precision are accelerate's: `accelerate launch --mixed_precision bf16 ...`. On a CPU
nothing is offloaded unless --disk names a folder to move it to, or --cpu_copies asks for the copies of a GPU.
--config_path FILE reads any flags from YAML or JSON.
"""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from datasets import DatasetDict
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_memopt.checkpoint import endless_batches
from hf_memopt.command_line import one_line_errors
from hf_memopt.memory import MemoryLogger
from hf_memopt.recipes.causal_lm import data as data
from hf_memopt.recipes.causal_lm.options import Options, TrainingOptions, parse
from hf_memopt.recipes.causal_lm.step import Run, make_model, make_optimizer, stream_weights, update
from hf_memopt.recipes.causal_lm.workload import CausalLM
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.common import results as common
from hf_memopt.recipes.common.auto_plan import train_within_memory
from hf_memopt.recipes.common.comparison import read_costs
from hf_memopt.weights.optimizer import report_of

logger = logging.getLogger("hf_memopt.recipes.train_causal_lm")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    with loop.writing_to(options.training.output_dir, accelerator):
        with accelerator.main_process_first():  # the others find tokenized datasets in the cache
            tokenizer, blocks = load(options)
        logger.info(
            f"Data: {data.describe_corpus(options.data)}; {len(blocks['train']):,} blocks of {options.data.block_size} "
            f"tokens and {len(blocks['test']):,} held out, vocabulary {len(tokenizer):,}"
        )
        # With --plan, micro-batch and memory flags are chosen by simulation; everything after sees the chosen ones.
        begin = options, accelerator, partial(CausalLM, options, tokenizer), make_accelerator
        run, cost = train_within_memory(
            *begin, lambda accelerator, options: train(prepare(accelerator, options, tokenizer, blocks))
        )
        output, results = Path(options.training.output_dir), {}
        if accelerator.is_main_process:
            tokenizer.save_pretrained(output)
        with loop.reporting(output):
            results = results_of(run, cost)
            if accelerator.is_main_process:
                write_report(results, output)
    run.accelerator.end_training()
    return results


def make_accelerator(options: Options) -> Accelerator:
    training = options.training
    # Windows run across the ends of epochs, so that every update is made of equally many blocks.
    windows = GradientAccumulationPlugin(num_steps=training.gradient_accumulation_steps, sync_with_dataloader=False)
    return loop.make_accelerator(training, training.output_dir, gradient_accumulation_plugin=windows)


def load(options: Options) -> tuple[Any, DatasetDict]:
    texts = data.read_texts(options.data)
    tokenizer = data.make_tokenizer(options.model, texts)
    return tokenizer, data.pack(texts, tokenizer, options.data, options.training.seed)


def prepare(accelerator: Accelerator, options: Options, tokenizer: Any, blocks: DatasetDict) -> Run:
    """Return model, optimizer, schedule and batches, the same for every call."""
    training = options.training
    num_blocks = training.per_device_batch_size * accelerator.num_processes
    if num_blocks > len(blocks["train"]):
        raise ValueError(
            f"per_device_batch_size={training.per_device_batch_size}: a batch of all processes needs {num_blocks} "
            f"blocks, and there are {len(blocks['train'])}; use smaller batches, shorter blocks or more text"
        )
    set_seed(training.seed)
    model = make_model(options.model, tokenizer, options.data.block_size)
    weights = stream_weights(model, options, accelerator.device)
    optimizer = make_optimizer(model, options, accelerator.device, weights)
    scheduler = loop.make_schedule(optimizer, training, training.max_steps, accelerator.num_processes)
    loader = {"batch_size": training.per_device_batch_size, "collate_fn": default_data_collator}
    # A generator of its own keeps the loader from drawing from the one that dropout uses, so that resuming is exact.
    batches = DataLoader(blocks["train"], shuffle=True, drop_last=True, generator=torch.Generator(), **loader)
    held_out = DataLoader(blocks["test"], generator=torch.Generator(), **loader)
    model, optimizer, scheduler, batches, held_out = accelerator.prepare(model, optimizer, scheduler, batches, held_out)
    memory = MemoryLogger(accelerator, log_every=training.log_every, output_dir=training.output_dir)
    run = Run(
        accelerator, options, model, optimizer, scheduler, batches, memory=memory, held_out=held_out, weights=weights
    )
    run.finite = run.finite_check(model, optimizer)
    return run


def evaluate(run: Run) -> dict[str, float]:
    run.model.eval()
    losses = []
    with torch.no_grad():
        for batch in run.held_out:
            with run.visiting():
                loss = run.model(**batch, labels=batch["input_ids"]).loss
            losses.append(run.accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    run.model.train()
    eval_loss = torch.cat(losses).mean().item()
    return {"eval_loss": eval_loss, "perplexity": math.exp(eval_loss)}


def train(run: Run) -> tuple[Run, common.RunCost]:
    training = run.options.training
    common.announce(run.model, run.options.offload, run.accelerator)
    run.begin("causal_lm", training.checkpoints_total_limit, training.resume_from_checkpoint)
    progress = run.progress
    run.model.train()
    num_taken = progress.num_updates * training.gradient_accumulation_steps
    batches = endless_batches(run.accelerator, run.batches, num_taken)
    checkpointing = "" if run.options.model.gradient_checkpointing else "--gradient_checkpointing"
    with run.updates(training.max_steps, checkpointing):
        while progress.num_updates < training.max_steps:
            with run.timed_update():
                loss = update(run, batches)
            log_and_evaluate(run, loss, training)
            if run.save_and_stop(due=loop.is_due(progress.num_updates, training.checkpointing_steps)):
                break
    save_model(run, training.output_dir)
    return run, run.end()


def log_and_evaluate(run: Run, loss: Tensor, training: TrainingOptions) -> None:
    num_updates = run.progress.num_updates
    at_end = num_updates == training.max_steps
    run.memory.log(num_updates)
    if at_end or loop.is_due(num_updates, training.log_every):
        mean_loss = run.accelerator.reduce(loss, "mean").item()
        figures = {"loss": mean_loss, "learning_rate": run.scheduler.get_last_lr()[0]}
        loop.record(run, "update", num_updates, figures)
    if at_end or loop.is_due(num_updates, training.eval_every):
        loop.record(run, "update", num_updates, evaluate(run))


def save_model(run: Run, folder: str) -> None:
    run.accelerator.wait_for_everyone()
    run.accelerator.unwrap_model(run.model).save_pretrained(
        folder,
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
        state_dict=run.accelerator.get_state_dict(run.model),
    )


def results_of(run: Run, cost: common.RunCost) -> dict[str, Any]:
    final = [entry for entry in run.progress.history if "eval_loss" in entry][-1]
    more = {"corpus": data.describe_corpus(run.options.data), "final": final, "optimizer": report_of(run.optimizer)}
    return common.run_results(run, cost, libraries=("transformers", "datasets"), **more)


def write_report(results: dict[str, Any], output: Path) -> None:
    """Write `results.json`, and `results.png` with the modes that `hf-memopt compare` measured in this folder."""
    common.write_results(results, output)
    training = [results["training_cost"]]
    if common.can_draw("results.png"):
        draw(results, read_costs(output) or training, output / "results.png")
    logger.info("\n" + common.table(training, results["device"]))
    if results["optimizer"] is not None:
        logger.info(f"{results['optimizer']}")


def draw(results: dict[str, Any], costs: list[common.RunCost], file: Path) -> None:
    modes, on_cpu = [cost.mode for cost in costs], results["device"] == "cpu"
    with common.drawn(file, 1, 3, dpi=110, figsize=(13, 3.8)) as (learning, memory, speed):
        common.plot_history(learning, results["history"], "update", {"loss": "training"}, "-")
        common.plot_history(learning, results["history"], "update", {"eval_loss": "held out"}, "o-")
        learning.set(title=f"Loss, mode {results['mode']}", xlabel="updates", ylabel="nats per token")
        learning.legend()
        memory.bar(modes, [(cost.saved_mib if on_cpu else cost.peak_mib) or 0 for cost in costs], color="#dd8452")
        memory.set(title="Saved activations on the device" if on_cpu else "Peak memory of the device", ylabel="MiB")
        speed.bar(modes, [cost.step_ms or 0 for cost in costs], color="#4c72b0")
        speed.set(title="Median time of an update" + (" (CPU)" if on_cpu else ""), ylabel="ms")
        for axes in (learning, memory, speed):
            axes.grid(alpha=0.3)


def losses(run: Run) -> Iterator[Tensor]:
    """Return the losses of endless updates, for `hf-memopt compare`."""
    run.model.train()
    batches = endless_batches(run.accelerator, run.batches)
    return iter(lambda: update(run, batches), None)


if __name__ == "__main__":
    sys.exit(one_line_errors("train_causal_lm", main))
