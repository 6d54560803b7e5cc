"""Tests that gradients are bitwise the plain run's on every architecture, and that weights never move."""

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

import pytest
import torch
from adversarial_copier import COPIERS
from architectures import ARCHITECTURES, Workload, equal, gradients, loss_of
from own_architectures import OWN_ARCHITECTURES
from random_plans import RandomPlanner
from weights_at_home import forbid_weights

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.memory import SavedBytes

pytestmark = [
    pytest.mark.usefixtures("quick_plans"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]

ALL = ARCHITECTURES | OWN_ARCHITECTURES
NAMES = list(ALL)
CHECKPOINTED = [name for name in NAMES if ALL[name].can_checkpoint]
CHOSEN_COPIERS = ("sync", "late")
# The logits of gpt2 alone are most of its saved bytes. A layer of the LSTM is one operation, whose backward needs all
# saved tensors at once, and all steps of `gates_in_place` share the storages of the gates.
BUDGET_SHARES = {"gpt2": 0.95, "lstm": 0.45, "gates_in_place": 0.42}


@dataclass(frozen=True)
class Settings:
    copier: str
    autocast: bool
    checkpointing: bool
    prefetch_ahead: int
    threshold_mib: int


def settings_of(index: int) -> Iterator[Settings]:
    """Yield the settings of four runs of an architecture. Over all architectures, every pair of values occurs."""
    can_checkpoint = ALL[NAMES[index]].can_checkpoint
    for row, (copier, autocast) in enumerate(itertools.product(CHOSEN_COPIERS, (False, True))):
        yield Settings(
            copier,
            autocast,
            checkpointing=can_checkpoint and (index + row // 2) % 2 == 0,
            prefetch_ahead=(index + row) % 5,
            threshold_mib=int((index + index // 4 + row) % 4 == 0),
        )


ROWS = [(name, settings) for index, name in enumerate(NAMES) for settings in settings_of(index)]


def identify(value: str | Settings) -> str:
    return value if isinstance(value, str) else "-".join(map(str, astuple(value)))


def build(name: str, checkpointing: bool = False) -> Workload:
    workload = ALL[name].build()
    if checkpointing:
        workload.checkpoint()
    return workload


def make_offloader(workload: Workload, settings: Settings) -> ActivationOffloader:
    return ActivationOffloader(
        mode="all",
        copier=forbid_weights(COPIERS[settings.copier](), workload.module),
        prefetch_ahead=settings.prefetch_ahead,
        offload_threshold_mb=settings.threshold_mib,
    )


@pytest.mark.sweep(share=1 / 10)
@pytest.mark.parametrize(("name", "settings"), ROWS, ids=identify)
def test_gradients_are_bitwise_the_plain_ones(name: str, settings: Settings) -> None:
    workload = build(name, settings.checkpointing)
    want = gradients(workload, settings.autocast)
    offloader = make_offloader(workload, settings)
    for _ in range(2):  # the second pass prefetches in the order of the first
        assert equal(gradients(workload, settings.autocast, offloader), want)
    stats = offloader.stats
    assert (stats.bytes_moved if settings.threshold_mib == 0 else stats.bytes_kept) > 0
    assert stats.host_bytes_live == 0


@pytest.mark.sweep(share=1 / 10)
@pytest.mark.parametrize(("index", "name"), list(enumerate(NAMES)))
def test_any_plan_gives_bitwise_the_plain_gradients(index: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = RandomPlanner(random.Random(index))
    monkeypatch.setattr("hf_memopt.activations.plan_maker.make_plan", planner)
    autocast, make_copier = index % 2 == 0, COPIERS[CHOSEN_COPIERS[index // 2 % 2]]
    workload = build(name)
    want = gradients(workload, autocast)
    copier = forbid_weights(make_copier(), workload.module)
    offloader = ActivationOffloader(mode="auto", offload_threshold_mb=0, copier=copier)
    for _ in range(4):  # the first two passes are recorded, with a plan made after each
        assert equal(gradients(workload, autocast, offloader), want)
    assert planner.num_recomputed > 0
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.sweep(share=1 / 10)  # since the search for a plan takes longest
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_keeps_to_its_budget_and_gives_bitwise_the_plain_gradients(name: str) -> None:
    workload = build(name)
    want = gradients(workload)
    with SavedBytes(exclude=workload.module.parameters()) as saved:
        loss_of(workload)
    budget_gib = BUDGET_SHARES.get(name, 0.4) * saved.total_bytes / 2**30
    copier = forbid_weights(SyncCopier(), workload.module)
    offloader = ActivationOffloader(mode="auto", budget_gib=budget_gib, offload_threshold_mb=0, copier=copier)
    for _ in range(5):
        assert equal(gradients(workload, offloader=offloader), want)
    stats = offloader.stats
    assert stats.measured_peak_gib <= stats.predicted_peak_gib <= budget_gib
    if ALL[name].family != "moe" and name != "wav2vec2":  # under a dispatch mode, ctc_loss saves the lengths as well
        assert stats.measured_peak_gib == stats.predicted_peak_gib
    assert stats.host_bytes_live == 0


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["llama", "mixtral", "unet2d"])
@pytest.mark.slow
def test_fifty_adamw_steps_end_on_bitwise_the_plain_weights(name: str) -> None:
    plain, offloaded = build(name), build(name)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    start = copy.deepcopy(plain.module.state_dict())
    train(plain, None)
    train(offloaded, offloader)
    end = plain.module.state_dict()
    assert offloader.stats.bytes_moved > 0
    assert not all(torch.equal(start[name], end[name]) for name in end)
    for key, weight in offloaded.module.state_dict().items():
        assert torch.equal(weight, end[key]), key


def train(workload: Workload, offloader: ActivationOffloader | None, num_steps: int = 50) -> None:
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=1e-3)
    for _ in range(num_steps):
        loss_of(workload, offloader=offloader).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_every_two_values_of_different_settings_meet() -> None:
    names = [field.name for field in fields(Settings)]
    for one, other in itertools.combinations(names, 2):
        values = [sorted({getattr(settings, name) for _, settings in ROWS}) for name in (one, other)]
        assert all(len(found) > 1 for found in values)
        met = {(getattr(settings, one), getattr(settings, other)) for _, settings in ROWS}
        assert met == set(itertools.product(*values)), f"{one} and {other}"


def test_there_are_architectures_of_every_family() -> None:
    assert len(NAMES) >= 25
    families = {architecture.family for architecture in ALL.values()}
    text = {"decoder", "encoder", "encoder-decoder", "moe", "state-space"}
    own = {"recurrent", "graph", "reinforcement", "adversarial"}
    assert families == text | {"vision", "audio", "diffusion", "operator"} | own


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_is_zero_and_every_build_is_the_same(name: str) -> None:
    found = gradients(build(name))
    assert all(gradient.any() for gradient in found if gradient is not None)
    assert equal(gradients(build(name)), found)


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_is_really_on(name: str) -> None:
    saved = []
    for checkpointing in (False, True):
        workload = build(name, checkpointing)
        with SavedBytes(exclude=workload.module.parameters()) as counter:
            loss_of(workload)
        saved.append(counter.total_bytes)
    assert saved[1] < saved[0]


@pytest.mark.parametrize("name", ["gpt2", "resnet", "fno"])
def test_a_threshold_of_one_mebibyte_parts_what_some_models_save(name: str) -> None:
    workload = build(name)
    offloader = make_offloader(workload, Settings("sync", False, False, 2, threshold_mib=1))
    gradients(workload, offloader=offloader)
    assert offloader.stats.bytes_moved >= 2**20
    assert offloader.stats.bytes_kept > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_on_its_way_to_the_host_is_noticed(dtype: torch.dtype) -> None:
    module = build("llama").module
    weight = next(module.parameters()).detach().to(dtype)
    with pytest.raises(AssertionError, match="a weight was sent"):
        forbid_weights(SyncCopier(), module).to_host(weight.flatten(), torch.empty_like(weight.flatten()))
