"""Settings to try after a run, by its figures, as the command or the option that tries them."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from hf_memopt.activations import ActivationOffloader
from hf_memopt.callbacks.settings_text import LAUNCHED, VARIABLE, settings_in, words_of_setting
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.units import GIB, MIB, format_bytes

# Shares of the plain step from which a plan counts as slow, and below which memory costs next to nothing.
_SLOW, _CHEAP = 0.05, 0.01
_FRAGMENTED = 0.10
# Frozen weights worth streaming, as a share of the device's peak.
_HEAVY = 0.25
# Arguments of `attach`; other settings are options of `ActivationOffloader`.
_OF_ATTACH = ("base", "selective_checkpointing")
_OPTION_NAMES = {"offload": "mode"}
# Of no meaning to `verify`, which performs a CPU's copies in any case.
_OF_THE_RUN = ("cpu_copies", "memory_log", "memory_report", "leak_check")


# Fields of `MemoptArguments` to change, and the reason.
NextSettings = tuple[Mapping[str, Any], str]


def advice(
    offloader: ActivationOffloader | None,
    model: nn.Module,
    device_type: str,
    figures: Mapping[str, float],
    *,
    base_streams: bool,
    is_selective: bool,
) -> list[tuple[str, str]]:
    """Return settings to try next as commands or options, each with its reason.

    `figures` are the last logged ones of `memory_metrics`; the two at the end are settings that are on already.
    """
    found = [*_about_activations(offloader, device_type, is_selective)]
    if not base_streams:
        found += _about_weights(model, figures)
    texts = [(_in_context(fields, offloader), reason) for fields, reason in found]
    fragmentation, peak = figures.get("memory/fragmentation_gib", 0.0), figures.get("memory/peak_allocated_gib", 0.0)
    if fragmentation > _FRAGMENTED * peak:
        unused = f"an environment variable: {format_bytes(fragmentation * GIB)} are reserved and not in use"
        texts.append(("PYTORCH_ALLOC_CONF=expandable_segments:True", unused))
    return [*texts, *_proof(offloader)]


def _about_activations(
    offloader: ActivationOffloader | None, device_type: str, is_selective: bool
) -> Iterator[NextSettings]:
    if offloader is None:
        on_cpu = {"disk": "."} if device_type == "cpu" else {}
        yield {"offload": "auto"} | on_cpu, "no activations were offloaded"
        return
    stats, plans = offloader.stats_at_peak, [report.plan for report in offloader.report().plans]
    half_gib = _rounded(stats.plain_peak_gib, 0.5)
    plain_peak = format_bytes((stats.plain_peak_gib or 0.0) * GIB)
    if stats.measured_peak_gib is None:
        yield from _where_nothing_moved(offloader, device_type)
    elif not plans:
        reason = f"a plan for half of the {plain_peak} that plain training saves keeps what costs most to move"
        yield {"offload": "auto", "budget_gib": half_gib}, reason
    elif all(not plan.offloaded_bytes and not plan.recomputed_bytes for plan in plans):
        reason = f"the plan keeps everything; this budget is half of the {plain_peak} that plain training saves"
        yield {"budget_gib": half_gib}, reason
    else:
        slowdown = max(plan.slowdown for plan in plans)
        if slowdown > _SLOW and not is_selective:
            reason = f"the plan makes a step {slowdown:.0%} longer; fewer bytes wait then"
            yield {"selective_checkpointing": True}, reason
        budget_gib = offloader.options["budget_gib"]
        if slowdown > _SLOW and budget_gib is not None:
            yield {"budget_gib": _rounded(budget_gib, 1.5)}, "a larger budget leaves more on the device"
        if slowdown < _CHEAP:
            reason = "the plan makes a step less than 1% longer, so that less memory may cost next to nothing"
            yield {"budget_gib": _rounded(stats.measured_peak_gib, 0.5)}, reason


def _where_nothing_moved(offloader: ActivationOffloader, device_type: str) -> Iterator[NextSettings]:
    options = offloader.options
    largest_mb = offloader.largest_small_bytes / MIB
    too_small = largest_mb > 0
    # A quarter of the largest has some others above it.
    lower = {"offload_threshold_mb": _rounded(largest_mb, 0.25)} if too_small else {}
    found = f"; the largest saved tensor has {format_bytes(offloader.largest_small_bytes)}" if too_small else ""
    if device_type == "cpu" and options["copier"] is None and options["disk"] is None:
        reason = f"saved activations of a CPU are in host memory already; a folder on a local disk takes them{found}"
        yield {"disk": ".", **lower}, reason
        yield {"cpu_copies": True, **lower}, f"performs the copies of a GPU, to try them out{found}"
    elif too_small:
        yield lower, f"no saved tensor reached {options['offload_threshold_mb']:g} MiB{found}"


def _about_weights(model: nn.Module, figures: Mapping[str, float]) -> Iterator[NextSettings]:
    frozen_bytes = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    if frozen_bytes > _HEAVY * GIB * figures.get("memory/peak_allocated_gib", float("inf")):
        yield {"base": "auto"}, f"frozen weights hold {format_bytes(frozen_bytes)} of the device; streamed, hardly any"


def _in_context(fields: Mapping[str, Any], offloader: ActivationOffloader | None) -> str:
    """Return the command that starts this script with other settings, or the call to write in it."""
    launched = os.environ.get(LAUNCHED)
    if launched is not None:
        settings = settings_in(os.environ.get(VARIABLE, "")) | {name: str(value) for name, value in fields.items()}
        bare = {name: None if value == "True" else value for name, value in settings.items()}
        words = [word for name, value in bare.items() for word in words_of_setting(name, value)]
        return f"hf-memopt launch {shlex.join(words)} {launched}"
    if set(fields) <= set(_OF_ATTACH):
        return f"hf_memopt.attach(trainer, {_call_arguments(fields)})"
    changed = {_OPTION_NAMES.get(name, name): value for name, value in fields.items() if name != "cpu_copies"}
    copies = {"copier": SyncCopier()} if "cpu_copies" in fields else {}
    new, defaults = changed | copies, ActivationOffloader().options
    options = {} if offloader is None else offloader.options
    # A text cannot give what `skip` is.
    given = {name: value for name, value in options.items() if name not in ("skip", *new) and value != defaults[name]}
    return f"ActivationOffloader({_call_arguments(new | given)})"


def _call_arguments(values: Mapping[str, Any]) -> str:
    texts = {
        name: f"{type(value).__name__}()" if isinstance(value, Copier) else repr(value)
        for name, value in values.items()
    }
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _proof(offloader: ActivationOffloader | None) -> Sequence[tuple[str, str]]:
    launched = os.environ.get(LAUNCHED)
    if launched is None or offloader is None or offloader.stats.measured_peak_gib is None:
        return []
    settings = {"offload": "auto"} | settings_in(os.environ.get(VARIABLE, ""))
    exact = {name: value for name, value in settings.items() if name not in _OF_THE_RUN}
    switches = shlex.join([word for name, value in exact.items() for word in ("--switch", f"{name}={value or 'true'}")])
    return [(f"hf-memopt verify {switches} {launched}", "proves that the run's settings change no bit")]


def _rounded(gib: float | None, factor: float) -> float:
    """Return a share of a size with two digits that count."""
    return float(f"{factor * (gib or 0.0):.2g}")
