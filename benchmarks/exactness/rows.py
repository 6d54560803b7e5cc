"""The rows of the page "Who is exact": whose switch, and the command that compares it."""

from dataclasses import dataclass

SCRIPTS, PAIRS = "benchmarks.exactness.scripts", "benchmarks.exactness.pairs"


@dataclass(frozen=True)
class Row:
    """A memory switch and its comparison.

    Attributes:
        project: distribution that has the switch.
        switch: its name, for the table.
        command: words behind `hf-memopt verify`, or behind `python -m` for a pair of functions; empty, it cannot run.
        note: what to know about it; of one that cannot run, the reason.
        issue: upstream, of the fault that makes it differ.
        needs_rank: whether the script runs as one rank of a process group.
    """

    project: str
    switch: str
    command: tuple[str, ...] = ()
    note: str = ""
    issue: str = ""
    needs_rank: bool = False

    @property
    def is_pair(self) -> bool:
        return self.command[:1] == (PAIRS,)


def of_script(project: str, switch: str, switches: str, script: str, **options: object) -> Row:
    """Return the row of a script; `switches` are separated by spaces, and `script` has its arguments with it."""
    flags = [word for each in switches.split(" ") for word in ([each] if each.startswith("--") else ["--switch", each])]
    name, *arguments = script.split()
    return Row(project, switch, (*flags, "--", "-m", f"{SCRIPTS}.{name}", *arguments), **options)  # type: ignore[arg-type]


def of_deepspeed(switch: str, config: str, **options: object) -> Row:
    switches = f"deepspeed=benchmarks/exactness/deepspeed/{config}.json"
    return of_script("deepspeed", switch, switches, "trainer", needs_rank=True, **options)


def of_pair(project: str, switch: str, pair: str, **options: object) -> Row:
    return Row(project, switch, (PAIRS, *pair.split()), **options)  # type: ignore[arg-type]


EVERY_SIZE = "offload_threshold_mb=0"
ALL = f"offload=all {EVERY_SIZE}"
CHECKPOINTING = "gradient_checkpointing=true"
REENTRANT = 'gradient_checkpointing_kwargs={"use_reentrant":true}'
OTHER_MASKS = 'gradient_checkpointing_kwargs={"preserve_rng_state":false}'
BUDGET = "torch:_functorch.config.activation_memory_budget=0.5"
OTHER_ARITHMETIC = "other arithmetic: a control that must not be equal"
LABELS = "the padded run divides its loss by first tokens too, which nothing predicts"
COUNTS = "transformers#46204, merged since"
WITHOUT_COPIES = "its hooks ran, but it copies nothing on a CPU"
ROUNDED_STATES = "rounds its states, as documented"
DRAWN_AGAIN = "as documented: masks are drawn again"
HEAD_IS_WHOLE = "the factor reaches the hidden states, not the head's weight"
OWN_LOSS = "against the model's own loss"

ROWS = [
    of_script("hf_memopt", "offload=all", ALL, "trainer"),
    of_script("hf_memopt", "offload=all, dropout", ALL, "trainer --dropout 0.1"),
    of_script("hf_memopt", "offload=all, to a disk", f"{ALL} disk=.", "trainer"),
    of_script(
        "hf_memopt", "offload=auto, in a budget", f"offload=auto {EVERY_SIZE} budget_gib=0.002 --steps=5", "trainer"
    ),
    of_script(
        "hf_memopt", "offload=inputs, dropout", f"offload=inputs {EVERY_SIZE} {CHECKPOINTING}", "trainer --dropout 0.1"
    ),
    of_script("hf_memopt", "base=host, LoRA", "base=host", "sft --lora"),
    of_script("hf_memopt", "base=file, LoRA", "base=file", "sft --lora --dropout 0.1"),
    of_script("hf_memopt", "base=file, checkpointing", f"base=file {CHECKPOINTING}", "sft --lora --dropout 0.1"),
    of_pair("hf_memopt", "SelectiveCheckpoint, dropout", "our-selective --dropout 0.1"),
    of_pair("torch", "save_on_cpu, dropout", "save_on_cpu --dropout 0.1", note=WITHOUT_COPIES),
    of_pair("torch", "checkpoint, dropout", "checkpoint --dropout 0.1"),
    of_pair("torch", "checkpoint, reentrant, dropout", "checkpoint-reentrant --dropout 0.1"),
    of_pair("torch", "checkpoint, preserve_rng_state=False", "checkpoint-other-masks"),
    of_pair("torch", "the same, dropout", "checkpoint-other-masks --dropout 0.1", note=DRAWN_AGAIN),
    of_pair(
        "torch", "the same, reentrant, dropout", "checkpoint-reentrant-other-masks --dropout 0.1", note=DRAWN_AGAIN
    ),
    of_pair("torch", "selective checkpointing, dropout", "selective --dropout 0.1"),
    of_script("torch", "activation_memory_budget=0.5", BUDGET, "loop --compile"),
    of_script(
        "torch",
        "activation_memory_budget=0.5, dropout",
        BUDGET,
        "loop --compile --dropout 0.1",
        issue="pytorch#190758",
        note="masks are drawn again",
    ),
    of_pair("torch", "fully_shard, one process", "fsdp2 --dropout 0.1"),
    of_pair("torch", "fully_shard, CPUOffloadPolicy", "fsdp2-offload --dropout 0.1", note=WITHOUT_COPIES),
    of_script("transformers", "gradient_checkpointing", CHECKPOINTING, "trainer"),
    of_script("transformers", "gradient_checkpointing, dropout", CHECKPOINTING, "trainer --dropout 0.1"),
    of_script("transformers", "the same, reentrant", f"{CHECKPOINTING} {REENTRANT}", "trainer"),
    of_script("transformers", "the same, reentrant, dropout", f"{CHECKPOINTING} {REENTRANT}", "trainer --dropout 0.1"),
    of_script(
        "transformers",
        "the same, preserve_rng_state=False, dropout",
        f"{CHECKPOINTING} {OTHER_MASKS}",
        "trainer --dropout 0.1",
        note=DRAWN_AGAIN,
    ),
    of_script(
        "transformers",
        "batches of 2 x 2 instead of 4",
        "per_device_train_batch_size=2 gradient_accumulation_steps=2",
        "trainer",
    ),
    of_script("transformers", "sdpa instead of eager", "script:--attention=sdpa", "trainer --attention eager"),
    of_script("transformers", "optim=adafactor", "optim=adafactor", "trainer", note="another optimizer"),
    of_script("transformers", "bf16=true", "bf16=true", "trainer", note=OTHER_ARITHMETIC),
    Row("transformers", "torch_empty_cache_steps", note="there is no cache to empty on a CPU"),
    Row("transformers", "use_liger_kernel", note="Triton kernels: GPU only"),
    of_script("trl", "SFT: gradient_checkpointing, LoRA, dropout", CHECKPOINTING, "sft --lora --dropout 0.1"),
    of_pair("trl", "fused head (loss_type=nll)", "fused-head", note=OWN_LOSS),
    of_pair("trl", "fused head, LoRA", "fused-head-lora", note=OWN_LOSS),
    of_script("trl", "loss_type=chunked_nll", "loss_type=chunked_nll", "sft", note="an alias of nll in this version"),
    of_script(
        "trl", "packing, sdpa attention", "packing=true max_length=64", "sft --batch 32", note=LABELS, issue=COUNTS
    ),
    of_script("trl", "padding_free, sdpa attention", "padding_free=true", "sft", note=LABELS, issue=COUNTS),
    of_script("trl", "DPO: precompute_ref_log_probs", "precompute_ref_log_probs=true", "dpo"),
    of_script(
        "trl",
        "the same, dropout",
        "precompute_ref_log_probs=true",
        "dpo --dropout 0.1",
        note="the earlier pass draws from torch's generator: other masks",
    ),
    of_script("trl", "DPO: padding_free, sdpa attention", "padding_free=true", "dpo"),
    Row("trl", "activation_offloading", note="moves only tensors on an accelerator"),
    Row("accelerate", "FSDP2 by ACCELERATE_USE_FSDP", note="left out on a CPU; torch's fully_shard is above"),
    of_deepspeed("ZeRO-2", "zero2"),
    of_deepspeed("ZeRO-2, offload_optimizer", "zero2_offload", note="torch's AdamW"),
    of_deepspeed("the same, DeepSpeedCPUAdam", "zero2_cpu_adam", note="another optimizer"),
    of_deepspeed("ZeRO-3", "zero3"),
    of_deepspeed("ZeRO-3, offload_param, offload_optimizer", "zero3_offload", note="torch's AdamW"),
    of_pair("deepspeed", "TiledMLP, 4 tiles", "tiled-mlp"),
    of_pair("deepspeed", "sequence_tiled_compute, loss in 4 tiles", "tiled-compute"),
    of_pair("deepspeed", "TiledFusedLogitsLoss, 4 tiles", "tiled-loss"),
    of_pair("deepspeed", "the same, loss multiplied by 0.5", "tiled-loss-halved", note=HEAD_IS_WHOLE),
    of_pair("deepspeed", 'the same, "sum", divided by the number of labels', "tiled-loss-sum", note=HEAD_IS_WHOLE),
    of_pair(
        "deepspeed",
        'the same, "mean", tiles with unlike numbers of labels',
        "tiled-loss-uneven",
        note="as documented: a mean of means",
    ),
    of_script("torchao", "optim=adamw_torch_8bit", "optim=adamw_torch_8bit", "trainer", note=ROUNDED_STATES),
    of_script("torchao", "optim=adamw_torch_4bit", "optim=adamw_torch_4bit", "trainer", note=ROUNDED_STATES),
    Row("torchao", "CPUOffloadOptimizer", note="asserts CUDA or XPU"),
    of_pair("sentence-transformers", "CachedMultipleNegativesRankingLoss", "cached-loss"),
    of_pair(
        "sentence-transformers",
        "the same, dropout",
        "cached-loss --dropout 0.1",
        note="masks are drawn for each mini-batch, in another order",
    ),
    of_pair("diffusers", "enable_gradient_checkpointing, dropout", "unet-checkpointing --dropout 0.1"),
    of_pair("diffusers", "set_attention_slice", "unet-attention-slicing"),
]
