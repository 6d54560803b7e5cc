"""Tests that the saved tensors of modules in `skip` stay on the device in every mode, with the plain gradients."""

import copy
import logging
from typing import Any

import pytest
import torch
from as_plain import MODES, assert_as_plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, InfeasibleBudgetError, SyncCopier

BATCH = 16


class Tower(nn.Module):
    """A tower with its own encoding method beside forward, as in vision towers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).exp()


class VisionTower(Tower):
    pass


class Model(nn.Module):
    """A model whose saved tensors all have the shape `(BATCH, 8)`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.vision_tower = VisionTower()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.vision_tower(self.first(x).sin()))


def step(model: nn.Module, context: Any, number: int) -> Tensor:
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(number))
    with context(model):
        loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def moved(model: nn.Module, skip: Any, run: Any = step, **options: Any) -> int:
    offloader = ActivationOffloader(
        offload_threshold_mb=0, copier=SyncCopier(), skip=skip, **({"mode": "all"} | options)
    )
    run(model, offloader.offload_context, 0)
    assert offloader.stats.host_bytes_live == 0
    return offloader.stats.bytes_moved


NAMES = ("vision_tower", "vision_*", "VisionTower", "Tower")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip", [*((name,) for name in NAMES), (Tower,), ("Linear", nn.GELU)], ids=str)
@pytest.mark.sweep(share=0.15)
def test_gradients_are_the_plain_ones(model: Model, mode: str, skip: Any) -> None:
    for copier in ("early", "late"):
        assert_as_plain(step, model, mode, copier, skip=skip)


def test_what_the_modules_save_stays_and_everything_else_leaves(model: Model) -> None:
    in_tower = BATCH * 8 * 4 * 4  # the input, two tanh, of which one is the second layer's input, and an exponential
    everything = moved(model, ())
    for skip in (*((name,) for name in NAMES), (Tower,), (model.vision_tower,), [model.vision_tower, "head.99"]):
        assert moved(model, skip) == everything - in_tower, skip
    assert moved(model, ("*",)) == moved(model, (nn.Module,)) == BATCH * 8 * 4  # for the loss


def test_modules_inside_are_meant_also_where_their_owner_is_not_called_itself(model: Model) -> None:
    def encodes(model: Any, context: Any, number: int) -> None:
        with context(model):
            loss = model.vision_tower.encode(torch.ones(BATCH, 8, requires_grad=True) * 2).sum()
        loss.backward()

    # The method, which is no module, computes both tanh.
    assert moved(model, ("vision_tower",), encodes) == 2 * BATCH * 8 * 4
    assert moved(model, (), encodes) == 3 * BATCH * 8 * 4


def test_skipped_bytes_are_kept_ones(model: Model) -> None:
    def kept(skip: Any) -> int:
        offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier(), skip=skip)
        step(model, offloader.offload_context, 0)
        return offloader.stats.bytes_kept

    assert kept(()) == 0
    # Saves count one by one: by both layers, both tanh, exp, and the head, whose input exp has also saved.
    assert kept(("vision_tower",)) == 6 * BATCH * 8 * 4


def test_without_a_model_classes_are_known(model: Model) -> None:
    def anonymous(model: nn.Module, context: Any, number: int) -> Tensor:
        return step(model, lambda model: context(), number)

    for skip in ("VisionTower",), (Tower,), (model.vision_tower,):
        assert moved(model, skip, anonymous) < moved(model, ("vision_tower",), anonymous) == moved(model, (), anonymous)


def test_a_budget_counts_what_stays(model: Model) -> None:
    def smallest_bytes(skip: Any) -> int:
        offloader = ActivationOffloader(budget_gib=0, offload_threshold_mb=0, copier=SyncCopier(), skip=skip)
        step(model, offloader.offload_context, 0)
        with pytest.raises(InfeasibleBudgetError) as error:
            step(model, offloader.offload_context, 1)
        return error.value.smallest_bytes

    skip = ("vision_tower",)
    budget_bytes = smallest_bytes(skip)
    assert budget_bytes > smallest_bytes(())
    offloader = ActivationOffloader(
        budget_gib=budget_bytes / 2**30, offload_threshold_mb=0, copier=SyncCopier(), skip=skip
    )
    for number in range(4):
        step(model, offloader.offload_context, number)
    assert offloader.stats.predicted_peak_gib == offloader.stats.measured_peak_gib == budget_bytes / 2**30


def test_inputs_of_checkpointed_regions(model: Model) -> None:
    def checkpointed(model: Any, context: Any, number: int) -> Tensor:
        with context(model):
            x = model.first(torch.ones(BATCH, 8))
            loss = model.head(checkpoint(model.vision_tower, x, use_reentrant=False)).sum()
        loss.backward()
        return loss.detach()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, context: Any, number: int) -> Tensor:
            return checkpointed(self.inner, context, number)

    outer = Outer()
    for mode in ("all", "inputs"):
        plain = moved(model, (), checkpointed, mode=mode)
        assert plain >= BATCH * 8 * 4

        def run(model: Any, context: Any, number: int) -> None:
            outer(context, number)

        assert moved(model, (Outer,), run, mode=mode) == 0
        assert_as_plain(checkpointed, model, mode, skip=("Tower",))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own warning
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_modules(model: Model, how: str) -> None:
    """Check modules around a compiled graph, which has none inside."""
    torch._dynamo.reset()
    before = moved(model, ("vision_tower",))
    inner = model.vision_tower
    if how == "in place":
        inner.compile(backend="aot_eager")
    else:
        model.vision_tower = torch.compile(inner, backend="aot_eager")  # type: ignore[assignment]
    for skip in (("vision_tower",), ("VisionTower",), (Tower,), (inner,)):
        assert_as_plain(step, model, "all", skip=skip)
        assert moved(model, skip) == before < moved(model, ())
    torch._dynamo.reset()


def test_names_are_those_within_wrappers(model: Model) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = model

        def forward(self, x: Tensor) -> Tensor:
            return self._orig_mod(x)

    holder = Holder()
    for name in ("vision_tower.layers", "head.2", "head"):
        assert moved(holder, (name,)) == moved(model, (name,)) < moved(model, ())
    assert moved(holder, ("_orig_mod.head",)) == moved(model, ("head",))


def test_what_nothing_matches_is_said_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    other = nn.Sequential(nn.Linear(8, 8))
    offloader = ActivationOffloader(
        offload_threshold_mb=0, copier=SyncCopier(), skip=("head", "vision_towre", nn.Conv1d)
    )
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            step(other, offloader.offload_context, number)
            step(model, offloader.offload_context, number)
            assert not caplog.messages or number
        step(other, offloader.offload_context, 2)
    (message,) = caplog.messages
    assert "skip: 'vision_towre', Conv1d is no module, class or name in Sequential" in message


def test_a_copied_model_skips_its_own_modules(model: Model) -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier(), skip=(model.vision_tower,))
    offloader.wrap(model)
    copied = copy.deepcopy(model)
    (hook,) = copied._forward_pre_hooks.values()
    twin: Any = hook.__self__.offloader  # type: ignore[attr-defined]
    assert twin is not offloader
    assert twin._options["skip"] == (copied.vision_tower,)


@pytest.mark.parametrize(
    ("skip", "complaint"),
    [
        ("lm_head", "skip='lm_head' must be a sequence"),
        (nn.Sequential(), r"skip=Sequential\(\) must be a sequence"),
        (nn.Linear, "must be a sequence"),
        (3, "skip=3 must be a sequence"),
        (("",), "skip has '', which is no module"),
        ((int,), "skip has <class 'int'>, which is no module"),
        (("head", 3), "skip has 3, which is no module, no class of modules and no name pattern"),
    ],
)
def test_what_names_no_module_is_refused(skip: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ActivationOffloader(skip=skip)
