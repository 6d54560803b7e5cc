"""The levers of a transformers model: settings that give up time, or precision, for memory, and their options."""

from collections.abc import Iterator, Mapping
from typing import Any

from hf_memopt.planning.job import CHOICES
from hf_memopt.planning.models.accelerate_config import DDP, FSDP2, HOST, NVME, ZERO2, ZERO3
from hf_memopt.planning.workload import OFF

# From the fastest to the most frugal: checkpointing and offload.
ACTIVATIONS = {
    "on the device": ("none", "off"),
    "offloaded where free": ("none", "auto"),
    "selectively checkpointed": ("selective", "off"),
    "checkpointed": ("full", "off"),
    "checkpointed, inputs offloaded": ("full", "inputs"),
    "all offloaded": ("none", "all"),
}
# Keeps what there is room for, and offloads all where there is none.
ADAPTIVE = {"offloaded where free": "all offloaded"}
# With an engine or a gradient cache.
_OF_SHARDS = ("on the device", "selectively checkpointed", "checkpointed")
# A trainer has one loss: "loss" has no other value, and may still be named.
VARIED = ("optimizer", "loss", "base", "precision", "quantize")

# Fields of `ModelOptions`, and their values.
Changes = Mapping[str, Any]


def check_varied(vary: str | None) -> tuple[str, ...] | None:
    """Return the names in a text such as "optimizer,loss"."""
    if vary is None:
        return None
    names = tuple(name.strip() for name in vary.split(","))
    for name in names:
        if name not in VARIED:
            raise ValueError(f"vary={vary!r}: {name!r} is not a lever; choose from {', '.join(VARIED)}")
    return names


def choices_of(options: Any, varied: tuple[str, ...] | None) -> dict[str, dict[str, Changes]]:
    """Return the values of each lever and the `ModelOptions` that they change; the first of each changes none.

    `varied` names the levers besides activations. None has those that change no bit: the homes of frozen weights, or
    of weights that train and the optimizer's state.
    """
    is_plain = options.engine == DDP and not options.gradient_cache
    ways = [name for name in ACTIVATIONS if is_plain or name in _OF_SHARDS]
    # The step takes these as arguments.
    found: dict[str, dict[str, Changes]] = {"activations": {name: {} for name in ways}}
    streams = options.streams and options.base != OFF
    if "base" in (varied or ("base",)) and streams:
        names = CHOICES["base"] if options.base is None else (options.base,)
        found["base"] = {name: {"base": name} for name in names}
    # Adapters have little to keep elsewhere. An engine would move the frozen weights: a streamed base does so better.
    has_homes = "base" in found or options.home_of_state != "off"
    optimizers = _optimizers_in_place if has_homes else _optimizers
    makers = {"optimizer": optimizers, "precision": _precisions, "quantize": _quantizations}
    if varied is None and is_plain and not has_homes and options.lora_rank is None:
        found["optimizer"] = {options.optimizer: {}} | dict(_homes(options))
    for name in varied or ():
        if name in makers:
            found[name] = dict(makers[name](options))
    return found


def _optimizers(options: Any) -> Iterator[tuple[str, Changes]]:
    yield options.optimizer, {}
    if options.sharing.has_group:
        places = [(HOST, {"optimizer_on": HOST})]
        if options.engine == ZERO3:
            places += [
                ("host, with the weights", {"optimizer_on": HOST, "weights_on": HOST}),
                (NVME, {"optimizer_on": NVME, "weights_on": HOST}),
            ]
        for place, changes in places:
            yield f"adamw on {place} ({options.engine})", changes
    else:
        # DeepSpeed has float32 copies of weights of 16 bits, which it trains in that precision.
        zero = {"precision": "bf16"} if (options.dtype, options.precision) == ("bfloat16", "no") else {}
        yield from _homes(options)
        yield "adamw and weights on host (fsdp2)", {"engine": FSDP2, "optimizer_on": HOST}
        yield "adamw on host (zero2)", zero | {"engine": ZERO2, "optimizer_on": HOST}
        yield "adamw and weights on host (zero3)", zero | {"engine": ZERO3, "optimizer_on": HOST, "weights_on": HOST}
        nvme = {"engine": ZERO3, "optimizer_on": NVME, "weights_on": HOST}
        yield "adamw on nvme, weights on host (zero3)", zero | nvme
    yield from _of_few_bits(options)


def _homes(options: Any) -> Iterator[tuple[str, Changes]]:
    yield f"{options.optimizer}, state on host", {"optimizer_home": "host"}
    yield f"{options.optimizer}, state in a file", {"optimizer_home": "file"}
    if options.lora_rank is None and options.base is None:
        for home, place in (("host", "on host"), ("file", "in files")):
            yield f"{options.optimizer}, weights and gradients {place}", {"base": home, "trained": True}


def _optimizers_in_place(options: Any) -> Iterator[tuple[str, Changes]]:
    yield options.optimizer, {}
    yield from _of_few_bits(options)


def _of_few_bits(options: Any) -> Iterator[tuple[str, Changes]]:
    for name in ("adamw-8bit", "paged-adamw-8bit", "adamw-4bit"):
        if name != options.optimizer and not options.sharing.is_zero:
            yield name, {"optimizer": name}


def _precisions(options: Any) -> Iterator[tuple[str, Changes]]:
    yield f"{options.dtype} weights" + (f", {options.precision}" if options.precision != "no" else ""), {}
    if options.dtype == "float32":
        if options.precision == "no":
            yield "float32 weights, bf16", {"precision": "bf16"}
        yield "bfloat16 weights", {"dtype": "bfloat16", "precision": "no"}


# Configurations' names of the number of experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def has_experts(config: Any) -> bool:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(getattr(text, name, None) for name in _EXPERTS)


def _quantizations(options: Any) -> Iterator[tuple[str, Changes]]:
    yield options.quantize, {}
    if options.lora_rank is None or options.quantize != "none":
        return
    of_mixtures = ["nf4-experts"] if has_experts(options.config) else []
    for name in ("int8-torchao", "nf4", "nf4-double", *of_mixtures):
        yield name, {"quantize": name}
