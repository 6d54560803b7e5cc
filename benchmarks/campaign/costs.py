"""What a cell takes: seconds, device memory and page-locked memory, by arithmetic, before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.cells import Cell
from hf_memopt.estimate.gpus import CARDS, Card

GB = 1e9
# Qwen3-8B's layers: bytes that autograd saves per token and layer (benchmarks/activations/model.py counts them), and
# parameters, in bfloat16 with gradients.
SAVED_PER_TOKEN = 215_336
PARAMETERS = 193e6
HIDDEN = 4096
WHOLE_MODEL_LAYERS, WHOLE_MODEL_HEAD = 36, 2 * 151_936 * 4096
TRAINING_SHARE = 0.45  # of a card's peak speed that training reaches
PAGE_LOCK_GIB_S = 2.0  # until the probe has measured it
START_S = 6.0  # of a cell's process: the device's context, libraries, a model
LOST_TO_POWERS_OF_TWO = 1.3  # of what torch page-locks
VIEWS = 1.9  # of what is saved, with each view by itself and the weights


@dataclass(frozen=True)
class Machine:
    """Speeds that seconds follow from, in units per second."""

    name: str
    memory_bytes: float
    half_flops: float
    float32_flops: float
    link_bytes: float
    page_lock_bytes: float

    @staticmethod
    def of(card: Card) -> "Machine":
        flops = TRAINING_SHARE * card.half_flops, TRAINING_SHARE * card.float32_flops
        return Machine(card.name, card.memory_bytes, *flops, card.link_bytes_per_s, PAGE_LOCK_GIB_S * 2**30)

    @staticmethod
    def probed(name: str, probe: dict[str, Any]) -> "Machine":
        """By what the probe has found; float32 without TF32 at a fifteenth of bfloat16's speed, as on an H100."""
        half = TRAINING_SHARE / 0.7 * probe["half_flops"]  # of a plain matrix product's speed, not of the peak
        link = min(probe["to_device_gb_s"], probe["to_host_gb_s"]) * GB
        return Machine(name, probe["memory_bytes"][1], half, half / 15, link, probe["page_lock_gib_s"] * 2**30)


# What is printed before a start, whatever the machine.
REFERENCES = [Machine.of(CARDS["h100"]), Machine.of(CARDS["rtx4090"])]


@dataclass(frozen=True)
class Cost:
    """Of one cell.

    Attributes:
        start_s: of its process, before the first step.
        num_steps: with warm-up and the compared step.
        half_flop: of a step, in bfloat16.
        float32_flop: of a step, in float32.
        moved_bytes: of a step over the link, in the busier direction.
        pinned_bytes: of the host, page-locked once.
        device_bytes: at the peak; 0 where the arithmetic does not know.
    """

    start_s: float = START_S
    num_steps: int = 0
    half_flop: float = 0.0
    float32_flop: float = 0.0
    moved_bytes: float = 0.0
    pinned_bytes: float = 0.0
    device_bytes: float = 0.0

    def seconds(self, machine: Machine) -> float:
        compute = self.half_flop / machine.half_flops + self.float32_flop / machine.float32_flops
        step = max(compute, self.moved_bytes / machine.link_bytes)
        return self.start_s + self.num_steps * step + self.pinned_bytes / machine.page_lock_bytes


def cost_of(cell: Cell) -> Cost:
    return COSTS[cell.benchmark](cell.settings)


def activations(settings: dict[str, Any]) -> Cost:
    """One mode of `activations.offload`."""
    tokens, layers, mode = settings["num_tokens"], settings["layers"], settings["mode"]
    kept, moved, pinned = (tokens * num_bytes for num_bytes in _kept_moved_pinned(mode, layers))
    steps = settings["warmup"] + settings["steps"] + 1 + _passes_to_plan(mode)
    return Cost(
        num_steps=steps,
        half_flop=_flop(mode, layers, tokens),
        moved_bytes=moved * settings["link_divisor"],
        pinned_bytes=pinned,
        device_bytes=4 * PARAMETERS * layers + kept + 0.04 * SAVED_PER_TOKEN * layers * tokens + 2e9,
    )


def longest(settings: dict[str, Any]) -> Cost:
    """A search whose last length costs about as much as all before, and page-locks no more than the host has."""
    whole, mode = settings["workload"] == "lora", settings["mode"]
    layers = WHOLE_MODEL_LAYERS if whole else settings["layers"]
    weights = 2 * PARAMETERS * layers + WHOLE_MODEL_HEAD if whole else 4 * PARAMETERS * layers
    room = max(0.9 * (settings["card_gb"] or 0) * 2**30 - weights, 0.0)
    kept, moved, pinned = _kept_moved_pinned(mode, layers)
    tokens = min(room / kept, settings["to_tokens"], *([settings["host_limit_gib"] * 2**30 / pinned] if pinned else []))
    steps = 2.5 * (2 + settings["steps"] + _passes_to_plan(mode))
    return Cost(
        12.0 if whole else START_S,
        steps,
        _flop(mode, layers, tokens),
        moved_bytes=moved * tokens,
        pinned_bytes=2.5 * pinned * tokens,
        device_bytes=weights + kept * tokens,
    )


def _flop(mode: str, layers: int, tokens: float) -> float:
    """Of a step; checkpointing computes the forward pass twice."""
    again = 4 / 3 if mode in ("checkpointing", "checkpoint offload", "ours inputs") else 1.0
    return again * layers * (6 * PARAMETERS * tokens + 7 * HIDDEN * tokens**2)


def _passes_to_plan(mode: str) -> int:
    return 4 if "auto" in mode else 0


def _kept_moved_pinned(mode: str, layers: int) -> tuple[float, float, float]:
    """Bytes per token on the device, over the link in one direction, and page-locked.

    Whatever is moved or computed again, one layer is there at a time. A plan page-locks all when it is recorded.
    """
    saved, inputs, one_layer = SAVED_PER_TOKEN * layers, 2 * HIDDEN * layers, SAVED_PER_TOKEN
    if mode == "save_on_cpu":
        return one_layer, VIEWS * saved, LOST_TO_POWERS_OF_TWO * VIEWS * saved
    if mode == "TRL":
        return 2 * one_layer, saved, LOST_TO_POWERS_OF_TWO * saved
    if mode == "all above 10 MB":
        return 2 * one_layer, saved, saved
    if mode in ("ours inputs", "checkpoint offload"):
        return one_layer, inputs, inputs
    if mode == "checkpointing":
        return one_layer + inputs, 0.0, 0.0
    if mode.startswith("ours auto"):
        share = float(mode.split()[2]) / 100 if "%" in mode else 0.5
        return one_layer + share * saved, 0.5 * (1 - share) * saved, saved
    return saved, 0.0, 0.0


def teacher(settings: dict[str, Any]) -> Cost:
    """SmolVLA: 450 M parameters, 3,072 vision tokens per sample through the VLM, ten steps of the expert."""
    flop = settings["batch_size"] * (6 * 450e6 * 1100 + 3 * 2 * 86e6 * 3072 + 20 * 100e6 * 50)
    half = settings["dtype"] == "bfloat16"
    weights = 450e6 * (2 if half else 4)
    steps = settings["warmup"] + settings["steps"] + 2
    moved = 0.0 if settings["mode"].startswith("resident") else weights
    return Cost(14.0, steps, flop if half else 0.0, 0.0 if half else flop, moved, weights if moved else 0.0)


def operators(settings: dict[str, Any]) -> Cost:
    """An FNO saves 3.24 KB per grid point of a sample."""
    saved = 3.24e3 * settings["nodes"] ** 2 * settings["batch_size"]
    mode = settings["mode"]
    moved = saved if mode in ("ours all", "ours auto") else 1.4 * saved if mode == "save_on_cpu" else 0.0
    steps = settings["steps"] + 6
    flop = 60 * saved  # bound by memory: as many as its bytes take time for
    return Cost(num_steps=steps, float32_flop=flop, moved_bytes=moved, pinned_bytes=1.2 * moved, device_bytes=saved)


def fixed(start_s: float) -> Callable[[dict[str, Any]], Cost]:
    """For cells whose process takes longer than their steps."""
    return lambda settings: Cost(start_s)


COSTS: dict[str, Callable[[dict[str, Any]], Cost]] = {
    "campaign.probe": fixed(25.0),
    "activations.offload": activations,
    "activations.longest": longest,
    "teacher.offload": teacher,
    "operators.memory": operators,
    "planning.estimate": fixed(12.0),
    "planning.cache_clearing": fixed(20.0),
    "lgt.memory": fixed(16.0),
    "fluxflow.memory": fixed(18.0),
}
