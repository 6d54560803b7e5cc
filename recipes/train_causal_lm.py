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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed, tqdm
from datasets import DatasetDict
from hf_memopt.recipes import causal_lm_data as data
from hf_memopt.recipes import causal_lm_report as report
from hf_memopt.recipes.causal_lm_model import make_model, make_offloader
from hf_memopt.recipes.causal_lm_options import OffloadOptions, Options, parse, resumed_folder
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import default_data_collator, get_scheduler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_memopt import ActivationOffloader, MemoryLogger

logger = logging.getLogger("hf_memopt.recipes.train_causal_lm")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; returns what is written to `results.json`."""
    options = parse(__doc__, arguments)
    accelerator = make_accelerator(options)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_memopt").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    with accelerator.main_process_first():  # the others find tokenized datasets in the cache
        texts = data.read_texts(options.data)
        tokenizer = data.make_tokenizer(options.model, texts)
        blocks = data.pack(texts, tokenizer, options.data, options.training.seed)
    logger.info(
        f"Data: {data.describe_corpus(options.data)}; {len(blocks['train']):,} blocks of {options.data.block_size} "
        f"tokens and {len(blocks['test']):,} held out, vocabulary {len(tokenizer):,}"
    )
    with logging_redirect_tqdm():
        costs = [measure(mode, options, tokenizer, blocks) for mode in options.offload.compared_modes]
        if options.training.loop == "trainer":
            from hf_memopt.recipes.causal_lm_trainer import train_with_trainer

            results = train_with_trainer(options, tokenizer, blocks)
        else:
            results = train(prepare(accelerator, options.offload.offload, options, tokenizer, blocks), options)
    results["compared_costs"] = costs
    report.explain_idleness(results, options.offload)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(options.training.output_dir)
        report.write(results, Path(options.training.output_dir))
        logger.info("\n" + report.table(results))
    accelerator.end_training()
    return results


def make_accelerator(options: Options) -> Accelerator:
    training = options.training
    return Accelerator(
        # Windows run across the ends of epochs, so that every update is made of equally many blocks.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=training.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=training.seed),
        log_with=None if training.report_to == "none" else training.report_to,
        project_dir=training.output_dir,
    )


@dataclass
class Progress:
    """How far training has come; goes into checkpoints."""

    num_updates: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates, self.history = state["num_updates"], state["history"]


@dataclass
class Run:
    """What accelerate prepared, and the offloader."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches: DataLoader[Any]
    held_out: DataLoader[Any]
    offloader: ActivationOffloader | None
    mode: str
    max_grad_norm: float
    memory: MemoryLogger
    progress: Progress = field(default_factory=Progress)

    def saving(self) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        return nullcontext() if self.offloader is None else self.offloader.offload_context(self.model)


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
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate, weight_decay=training.weight_decay)
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
    prepared = accelerator.prepare(model, optimizer, scheduler, batches, held_out)
    offloader = make_offloader(mode, options.offload, accelerator.device)
    memory = MemoryLogger(accelerator, log_every=training.log_every, output_dir=training.output_dir)
    run = Run(accelerator, *prepared, offloader, mode, training.max_grad_norm, memory)
    accelerator.register_for_checkpointing(run.progress)
    return run


def endless(run: Run, num_taken: int) -> Iterator[dict[str, Tensor]]:
    """Training batches, shuffled anew for each epoch, from the one after the first `num_taken` on."""
    epoch, num_skipped = divmod(num_taken, len(run.batches))
    run.batches.set_epoch(epoch)
    yield from run.accelerator.skip_first_batches(run.batches, num_skipped)
    while True:
        epoch += 1
        run.batches.set_epoch(epoch)
        yield from run.batches


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
    training, accelerator, progress = options.training, run.accelerator, run.progress
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    report.announce(run.mode, num_parameters, options, accelerator)
    accelerator.init_trackers("causal_lm", config=options.settings)
    resumed = resumed_folder(training)
    if resumed is not None:
        accelerator.load_state(resumed)
        logger.info(f"Resumed {resumed} after {progress.num_updates} updates")
    run.model.train()
    batches = endless(run, progress.num_updates * training.gradient_accumulation_steps)
    meter = report.Meter(run.mode, accelerator.device, run.offloader)
    with tqdm(total=training.max_steps, initial=progress.num_updates, unit="update", desc="Training") as bar:
        while progress.num_updates < training.max_steps:
            meter.begin()
            loss = update(run, batches)
            meter.end()
            bar.update()
            run.memory.log(progress.num_updates)
            if due(progress.num_updates, training.log_every, training.max_steps):
                mean_loss = accelerator.reduce(loss, "mean").item()
                record(run, {"loss": mean_loss, "learning_rate": run.scheduler.get_last_lr()[0]})
            if due(progress.num_updates, training.eval_every, training.max_steps):
                record(run, evaluate(run))
            if training.save_every and progress.num_updates % training.save_every == 0:
                save_checkpoint(run, Path(training.output_dir))
    save_model(run, training.output_dir)
    return report.results(options, accelerator, progress.history, meter.cost())


def due(num_updates: int, every: int, last: int) -> bool:
    return num_updates % every == 0 or num_updates == last


def record(run: Run, figures: dict[str, float]) -> None:
    """Log figures, send them to the trackers and keep them."""
    num_updates = run.progress.num_updates
    run.progress.history.append({"update": num_updates, **figures})
    run.accelerator.log(figures, step=num_updates)
    logger.info(f"update {num_updates:6}  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def save_checkpoint(run: Run, output: Path) -> None:
    """Everything that resuming needs, under its final name only once it is complete."""
    folder = output / f"{PREFIX_CHECKPOINT_DIR}-{run.progress.num_updates}"
    draft = folder.with_name(f"{folder.name}.partial")
    run.accelerator.save_state(str(draft))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        draft.rename(folder)
    logger.info(f"Saved {folder}")


def save_model(run: Run, folder: str) -> None:
    run.accelerator.wait_for_everyone()
    run.accelerator.unwrap_model(run.model).save_pretrained(
        folder,
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
        state_dict=run.accelerator.get_state_dict(run.model),
    )


def measure(mode: str, options: Options, tokenizer: Any, blocks: DatasetDict) -> report.Cost:
    """A short run of its own in one mode: the same weights and batches each time, the second half measured."""
    num_updates = options.offload.compare_steps
    constant = replace(options.training, lr_scheduler_type="constant", max_steps=num_updates)
    options = options._replace(training=constant)
    run = prepare(make_accelerator(options), mode, options, tokenizer, blocks)
    run.model.train()
    batches = endless(run, 0)
    meter = report.Meter(mode, run.accelerator.device, run.offloader)
    losses = []
    for step in tqdm(range(num_updates), desc=f"Comparing: {mode}", unit="update", leave=False):
        if step == num_updates // 2:
            meter.restart()
        meter.begin()
        loss = update(run, batches)
        meter.end()
        losses.append(loss.item())
    cost = replace(meter.cost(), losses=losses)
    if run.offloader is None:
        cost.saved_mib = saved_mib(run, next(batches), options.offload)
    run.accelerator.free_memory()
    return cost


def saved_mib(run: Run, batch: dict[str, Tensor], options: OffloadOptions) -> float:
    """What a pass without offloading keeps for backward, counted as in the other modes."""
    keep_all = replace(options, host_budget_gib=0, cpu_copies=True)
    counter = make_offloader("all", keep_all, run.accelerator.device)
    with counter.offload_context(run.model):
        loss = run.model(**batch, labels=batch["input_ids"]).loss
    run.accelerator.backward(loss)
    return 1024 * counter.stats.measured_peak_gib


if __name__ == "__main__":
    main()
