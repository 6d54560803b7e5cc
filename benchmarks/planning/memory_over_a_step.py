"""Memory over one training step: plain, checkpointed, and offloaded under a budget; predicted and measured.

    python -m benchmarks.planning.memory_over_a_step

A small Llama trains on the CPU, which stands in for the device. Measured: every allocation and release of torch's CPU
allocator, by torch's profiler; host memory of the offloader is taken from the system and does not count. Predicted
before the run: the peak by `estimate_peak_memory(like="cpu")`. Under a budget, the estimate of the plain step less its
saved activations, plus their planned bytes, known after two recorded steps. Needs matplotlib.
"""

import mmap
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, finish, highest_points, print_rows
from hf_memopt import ActivationOffloader, SyncCopier, estimate_peak_memory

BATCH, LENGTH, VOCABULARY = 8, 256, 1024
BUDGET_MIB = 28
# Two steps are recorded, a third one follows the plan for the first time; the last step is measured.
NUM_STEPS = 5
NUM_POINTS = 300
# Width of each phase in the figure.
WIDTHS = {"forward": 1.0, "backward": 2.0, "update": 0.3}
COLORS = {"plain": "#7f8c9b", "checkpointing": "#4c78a8", "within a budget": "#e58b3d"}
# Large for the figure, whose page is as narrow as a phone.
FONT_SIZE = 13
FIGURE = Path(__file__).parents[2] / "docs" / "images" / "memory_over_a_step.png"


class SystemMemory(SyncCopier):
    """A copier into memory outside of torch's allocator, as the host memory of a GPU is."""

    def empty_host(self, num_bytes: int) -> Tensor:
        return torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8)


class Training:
    def __init__(
        self, device: Any, *, num_layers: int, checkpointing: bool = False, budget_mib: float | None = None
    ) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            use_cache=False,
        )
        with torch.device(device):
            self.model = LlamaForCausalLM(config).train()
            self.tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.offloader = ActivationOffloader(enabled=False)
        if budget_mib is not None:
            self.offloader = ActivationOffloader(
                budget_gib=budget_mib / 1024, offload_threshold_mb=0.25, copier=SystemMemory()
            )

    def step(self) -> None:
        with record_function("forward"), self.offloader.offload_context(self.model):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        with record_function("backward"):
            loss.backward()
        with record_function("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()
            del loss


def measured(**options: Any) -> tuple[Training, list[list[float]], int]:
    """Train; return the training, the last step's `[position, bytes]`, and its peak in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        training = Training("cpu", **options)
        for _ in range(NUM_STEPS):
            training.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    spans: dict[str, tuple[int, int]] = {}
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() in WIDTHS:
            spans[event.name()] = event.start_ns(), event.start_ns() + event.duration_ns()
    curve, held = [], 0
    for moment, change in changes:
        held += change
        place = _position(moment, spans)
        if place is not None:
            curve.append((place, held))
    highest = highest_points(curve, NUM_POINTS / sum(WIDTHS.values()))
    return training, [[round(place, 4), held] for place, held in highest], max(held for _, held in curve)


def _position(moment: int, spans: dict[str, tuple[int, int]]) -> float | None:
    """Return the place of a moment of the last step in the figure, None outside of its phases."""
    left = 0.0
    for phase, width in WIDTHS.items():
        start, end = spans[phase]
        if start <= moment <= end:
            return left + width * (moment - start) / (end - start)
        left += width
    return None


def predicted_peak(num_layers: int, checkpointing: bool) -> int:
    estimate = estimate_peak_memory(
        lambda device: Training(device, num_layers=num_layers, checkpointing=checkpointing),
        lambda training: training.step(),
        like="cpu",
        num_steps=2,
    )
    return estimate.peak_bytes


def planned_bytes(training: Training) -> int:
    peak_gib = training.offloader.stats.predicted_peak_gib
    assert peak_gib is not None
    return round(peak_gib * 2**30)


def measure(num_layers: int, budget_mib: float) -> dict[str, dict[str, Any]]:
    """Return by technique both peaks, the curve, and whether the weights are those of the plain run."""
    # Estimates fork this process, which torch allows only before the first backward pass.
    predicted = {
        "plain": predicted_peak(num_layers, checkpointing=False),
        "checkpointing": predicted_peak(num_layers, checkpointing=True),
    }
    options = {"plain": {}, "checkpointing": {"checkpointing": True}, "within a budget": {"budget_mib": budget_mib}}
    found: dict[str, dict[str, Any]] = {}
    weights: list[Tensor] = []
    for name, changed in options.items():
        training, curve, peak = measured(num_layers=num_layers, **changed)
        if name == "within a budget":
            everything = Training("cpu", num_layers=num_layers, budget_mib=2**20)
            for _ in range(NUM_STEPS):
                everything.step()
            predicted[name] = predicted["plain"] - planned_bytes(everything) + planned_bytes(training)
        weights = weights or list(training.model.parameters())
        found[name] = {
            "predicted_peak_bytes": predicted[name],
            "measured_peak_bytes": peak,
            "weights_equal": all(map(torch.equal, weights, training.model.parameters())),
            "curve": curve,
        }
    return found


@rc_context({"font.size": FONT_SIZE})
def draw(found: dict[str, dict[str, Any]], path: Path) -> Path:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    end = sum(WIDTHS.values())
    for name, row in found.items():
        places, held = zip(*row["curve"], strict=True)
        in_mib = [num_bytes / MIB for num_bytes in held]
        peak_mib, foreseen_mib = row["measured_peak_bytes"] / MIB, row["predicted_peak_bytes"] / MIB
        axes.fill_between(places, in_mib, color=COLORS[name], alpha=0.16, linewidth=0)
        axes.plot(places, in_mib, color=COLORS[name], linewidth=1.8)
        axes.plot([0, end], [foreseen_mib] * 2, "--", color=COLORS[name], linewidth=1)
        label = f"{name}\npredicted {foreseen_mib:.1f} MiB\nmeasured {peak_mib:.1f} MiB"
        axes.annotate(
            label,
            (end, foreseen_mib),
            xytext=(8, 4 if name == "checkpointing" else -2),
            textcoords="offset points",
            color=COLORS[name],
            va="bottom" if name == "checkpointing" else "top",
        )
    left = 0.0
    for phase, width in WIDTHS.items():
        axes.text(left + width / 2, 1.01, phase, ha="center", va="bottom", transform=axes.get_xaxis_transform())
        left += width
        axes.axvline(left, color="#d9dee4", linewidth=0.8, zorder=0)
    axes.set(ylabel="MiB of tensors", xlim=(0, end + 1.15), ylim=(0, None), xticks=[])
    axes.set_xlabel("one training step on a CPU: lines are measured, dashes are the predicted peaks", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path


def print_report(results: dict[str, Any]) -> None:
    rows = [
        {
            "technique": name,
            "predicted MiB": f"{row['predicted_peak_bytes'] / MIB:.2f}",
            "measured MiB": f"{row['measured_peak_bytes'] / MIB:.2f}",
            "weights equal": "yes" if row["weights_equal"] else "NO",
        }
        for name, row in results["techniques"].items()
    ]
    print(f"peak of a small Llama's step on a CPU: {results['layers']} layers, budget {results['budget_mib']} MiB")
    print_rows(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of the model (default: %(default)s)")
    parser.add_argument("--budget-mib", type=float, default=BUDGET_MIB, help="for saved activations (%(default)s)")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="PNG file (default: %(default)s)")
    options = parser.options(arguments)
    results = {
        **environment(CPU),
        "benchmark": "planning.memory_over_a_step",
        "layers": options.layers,
        "budget_mib": options.budget_mib,
        "techniques": measure(options.layers, options.budget_mib),
    }
    print("drew", draw(results["techniques"], options.figure))
    finish(results, print_report, options.output, "memory-over-a-step")


if __name__ == "__main__":
    main()
