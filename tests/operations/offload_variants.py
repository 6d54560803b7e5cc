"""Offloaded runs of a case, compared with plain runs: modes, forced plans, copiers, selective checkpointing."""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from adversarial_copier import AdversarialCopier
from operation_cases import Case
from operation_runs import CHECKPOINTED, PLAIN, SETTINGS, Setting, run, same
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt import ActivationOffloader, SelectiveCheckpoint
from hf_memopt.activations import plan_maker
from hf_memopt.activations.planner.offload_plan import OffloadPlan
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.transfer import Copier, SyncCopier, lower_memory
from hf_memopt.transfer.tier import Tier

# Two passes are recorded, the second of which has a plan already.
_PLANNED_PASSES = 4
_AMPLE_GIB = 1024

COPIERS: dict[str, Callable[[int], Copier]] = {
    "sync": lambda seed: SyncCopier(),
    "early": lambda seed: AdversarialCopier("early"),
    "late": lambda seed: AdversarialCopier("late"),
    "random": lambda seed: AdversarialCopier("random", seed),
}


def _plan(profile: Profile, choose: Callable[[bool], Action]) -> OffloadPlan:
    """Return a plan without a window: offloaded storages leave the device at once."""
    actions = tuple(choose(storage.recompute_s is not None) for storage in profile.storages)
    order = tuple(index for index in profile.use_order if actions[index] is Action.OFFLOAD)
    given = {
        "actions": actions,
        "memories": (0,) * len(actions),
        "reload_order": order,
        "prefetch_bytes": 2 * max(profile.sizes, default=0),
    }
    return OffloadPlan(**{each.name: given.get(each.name, 0) for each in fields(OffloadPlan)})


def _by_lot(seed: int) -> Callable[[bool], Action]:
    lots = random.Random(seed)
    return lambda can_recompute: lots.choice(list(Action) if can_recompute else [Action.KEEP, Action.OFFLOAD])


PLANS: dict[str, Callable[[int], Callable[[bool], Action]]] = {
    "recompute or offload": lambda seed: lambda can: Action.RECOMPUTE if can else Action.OFFLOAD,
    "recompute or keep": lambda seed: lambda can: Action.RECOMPUTE if can else Action.KEEP,
    "random plan": _by_lot,
}
STRATEGIES = ("all", *PLANS)


@contextmanager
def forced_plans(choose: Callable[[bool], Action]) -> Iterator[list[OffloadPlan]]:
    """Make mode "auto" take forced plans, and yield the list of plans made."""
    made: list[OffloadPlan] = []

    def make_plan(profile: Profile, tiers: Sequence[Tier], **limits: Any) -> OffloadPlan:
        made.append(_plan(profile, choose))
        return made[-1]

    own = plan_maker.make_plan, lower_memory.measure_link
    plan_maker.make_plan, lower_memory.measure_link = make_plan, lambda copier, clock: (1e10, 1e10)
    try:
        yield made
    finally:
        plan_maker.make_plan, lower_memory.measure_link = own


@dataclass(frozen=True)
class Variant:
    """A way of offloading: `strategy` is "all", "inputs" or in `PLANS`; random copiers and plans take `seed`."""

    strategy: str
    copier: str
    setting: Setting = PLAIN
    seed: int = 0
    threshold_mb: float = 0

    def __str__(self) -> str:
        return f"{self.strategy}, {self.copier} copier, {self.setting}"

    def passes(self, case: Case) -> Iterator[list[Any]]:
        """Yield the results of each pass with one offloader."""
        offloader = ActivationOffloader(
            mode="auto" if self.strategy in PLANS else self.strategy,
            offload_threshold_mb=self.threshold_mb,
            copier=COPIERS[self.copier](self.seed),
            # Without a budget one pass would go without a plan.
            budget_gib=_AMPLE_GIB if self.strategy in PLANS else None,
        )
        if self.strategy not in PLANS:
            yield run(case, self.setting, offloader.offload_context(case.model))
        else:
            with forced_plans(PLANS[self.strategy](self.seed)) as made:
                for _ in range(_PLANNED_PASSES):
                    yield run(case, self.setting, offloader.offload_context(case.model))
            assert made or self.threshold_mb, "no plan was made"
        # A case may save no inputs, or only weights; otherwise the ballast moves.
        has_moved = offloader.stats.bytes_moved > 0
        assert has_moved or self.strategy == "inputs" or self.threshold_mb, "nothing was moved"


def variants_of(case: Case, *, thorough: bool = True, threshold_mb: float = 0) -> Iterator[Variant]:
    """Yield every strategy plainly, with every copier, and "all", "inputs" and one plan in each other setting.

    Other settings, and dtypes other than float32, have one copier by lot, which depends on the case: saves and their
    times are the same. If not `thorough`, all have one copier, and only autocast and another setting by lot run.
    """
    lots = random.Random(zlib.crc32(case.label.encode()))
    every_copier = thorough and all(leaf.dtype is torch.float32 for leaf in case.leaves)
    for strategy, setting in [(strategy, PLAIN) for strategy in STRATEGIES] + [("inputs", CHECKPOINTED)]:
        for copier in COPIERS if every_copier else (lots.choice(list(COPIERS)),):
            yield Variant(strategy, copier, setting, lots.randrange(1000), threshold_mb)
    autocast, *others = SETTINGS[1:]
    for setting in (autocast, *(others if thorough else lots.sample(others, 1))):
        strategies = ["all", lots.choice(list(PLANS))]
        if setting.checkpointed and setting != CHECKPOINTED:
            strategies.append("inputs")
        for strategy in strategies:
            yield Variant(strategy, lots.choice(list(COPIERS)), setting, lots.randrange(1000), threshold_mb)


class EmptyMode(TorchDispatchMode):
    """A mode without effect of its own, inside which some of torch's formulas compute differently."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Controls:
    """The plain runs of a case, with the reasons why some settings cannot be compared."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._found: dict[Setting, tuple[list[Any], str]] = {}

    def expected(self, setting: Setting) -> list[Any]:
        """Return the plain run's results, which are useless if there is an `obstacle`."""
        return self._control(setting)[0]

    def obstacle(self, setting: Setting) -> str:
        """Return why torch alone fails: plain runs raise or differ, or checkpointing changes them. Empty if not."""
        return self._control(setting)[1]

    def excuse(self, variant: "Variant") -> str:
        """Return why a variant fails through no fault of the offloader, empty without a reason.

        Plans come from passes recorded in a dispatch mode, which the offloader cannot leave for the nodes of
        checkpointed regions; see "Limits" in docs/activation_offloading.md.
        """
        setting = variant.setting
        if variant.strategy not in PLANS or not setting.checkpointed:
            return ""
        try:
            is_same = same(run(self._case, setting, EmptyMode()), self.expected(setting))
        except Exception as error:
            return f"raises inside an empty dispatch mode: {_brief(error)}"
        return "" if is_same else "other bits inside an empty dispatch mode"

    def _control(self, setting: Setting) -> tuple[list[Any], str]:
        if setting not in self._found:
            self._found[setting] = self._run(setting)
        return self._found[setting]

    def _run(self, setting: Setting) -> tuple[list[Any], str]:
        if setting.backward == "second" and not self._case.has_second:
            return [], "no second derivative"
        try:
            first, second = run(self._case, setting), run(self._case, setting)
        except Exception as error:
            return [], f"raises {type(error).__name__}: {_brief(error)}"
        if not same(first, second):
            return [], "two plain runs differ"
        if setting.checkpointed and not same(first, self.expected(replace(setting, checkpointed=False))):
            return [], "other bits under torch's checkpointing"
        return first, ""


def selective_runs(case: Case) -> dict[str, Callable[[], list[Any]]]:
    """Return runs with selective checkpointing, alone and offloaded."""

    def selective(policy: str, offloaded: bool) -> list[Any]:
        offloader = ActivationOffloader(enabled=offloaded, mode="all", offload_threshold_mb=0, copier=SyncCopier())
        return run(case, PLAIN, offloader.offload_context(case.model), SelectiveCheckpoint(policy))

    return {
        f"SelectiveCheckpoint({policy!r}){' and all' * offloaded}": partial(selective, policy, offloaded)
        for policy in ("heavy_ops", "all")
        for offloaded in (False, True)
    }


@dataclass
class Outcome:
    obstacles: dict[str, str]
    failures: list[str]


def try_everything(case: Case, *, thorough: bool = True, threshold_mb: float = 0) -> Outcome:
    """Run a case in the variants that torch alone can do."""
    controls = Controls(case)
    outcome = Outcome({}, [])
    for variant in variants_of(case, thorough=thorough, threshold_mb=threshold_mb):
        failures: list[str] = []
        obstacle = controls.obstacle(variant.setting)
        if not obstacle:
            expected = controls.expected(variant.setting)
            failures = _failures(str(variant), lambda v=variant: v.passes(case), expected)
            obstacle = controls.excuse(variant) if failures else ""
        if obstacle:
            outcome.obstacles[str(variant.setting)] = f"{case.label}: {obstacle}"
        else:
            outcome.failures += failures
    if not controls.obstacle(CHECKPOINTED):
        outcome.failures += _selective_failures(case, controls.expected(CHECKPOINTED))
    outcome.failures = [f"{case.label}: {failure}" for failure in outcome.failures]
    return outcome


def _selective_failures(case: Case, expected: list[Any]) -> list[str]:
    run(case, PLAIN)
    writes_buffers = case.has_written_buffers()
    failures = []
    for name, selective in selective_runs(case).items():
        found = _failures(name, lambda s=selective: [s()], expected)
        is_refused = any("cannot be checkpointed: its forward writes the buffer" in failure for failure in found)
        if is_refused != writes_buffers:
            failures.append(f"{name}: {'refused' if is_refused else 'writes a buffer, and is not refused'}")
        elif not is_refused:
            failures += found
    return failures


def _failures(name: str, passes: Callable[[], Any], expected: list[Any]) -> list[str]:
    """Return an exception, or the numbers of the passes with other results."""
    wrong = []
    try:
        for number, got in enumerate(passes()):
            if not same(got, expected):
                wrong.append(number)
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {_brief(error)}"]
    return [f"{name}: other bits in passes {wrong}"] if wrong else []


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
