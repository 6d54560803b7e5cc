"""Tests of optimizers whose state lives on the host or in a file."""

import gc
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from adversarial_copier import AdversarialCopier, InjectedError
from adversarial_file import AdversarialFile
from interrupts import Interrupter
from optimizer_toys import MAKERS, WIDTH, Coupled, backward, equal, model, same, train, trained
from safetensors.torch import load_file, save_file
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_memopt import OffloadedOptimizer, verify
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.units import GIB, MIB
from hf_memopt.weights.coupling import UpdateVisits

STATE_BYTES = 8 * sum(each.numel() for each in model().parameters())


def offloaded(network: nn.Module, kind: str = "adamw", **options: Any) -> OffloadedOptimizer:
    return OffloadedOptimizer(MAKERS[kind](network.parameters()), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.sweep(share=0.15)
def test_weights_and_state_are_those_of_the_plain_optimizer(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if kind == "sgd fused" and dtype is torch.bfloat16:
        pytest.skip("torch's kernel begins with momentum that nobody has set: two plain runs differ")
    want = trained(kind, dtype)
    assert same(trained(kind, dtype, home="host"), want)
    assert same(trained(kind, dtype, home="file", disk=tmp_path), want)


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("schedule", ["early", "late", "random"])
@pytest.mark.parametrize("kind", ["adamw foreach", "adafactor"])
def test_copies_may_take_place_at_any_time(kind: str, schedule: str, home: Any, tmp_path: Path) -> None:
    found = trained(kind, home=home, disk=tmp_path, copier=AdversarialCopier(schedule))
    assert same(found, trained(kind))


def on_a_file(folder: Path, copier: Any = None, **faults: Any) -> tuple[nn.Module, OffloadedOptimizer, AdversarialFile]:
    network = model()
    optimizer = offloaded(network, home="file", copier=copier)
    optimizer._home.file = AdversarialFile(folder, **faults)
    return network, optimizer, optimizer._home.file


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_reads_and_writes_of_the_file_may_take_place_at_any_time(schedule: str, tmp_path: Path) -> None:
    network, optimizer, _ = on_a_file(tmp_path, schedule=schedule)
    train(network, optimizer)
    assert same((network, optimizer), trained("adamw"))


def train_through_errors(network: nn.Module, optimizer: OffloadedOptimizer) -> int:
    """Take four updates, and finish those that fail; returns how many did."""
    num_errors = 0
    for number in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        backward(network, number)
        go_on: Callable[[], None] = optimizer.step
        while True:
            try:
                go_on()
                break
            except (DiskError, InjectedError):
                num_errors += 1
                if optimizer._update is not None:
                    with pytest.raises(RuntimeError, match="an update was interrupted"):
                        optimizer.step()
                    with pytest.raises(RuntimeError, match="an update was interrupted"):
                        optimizer.state_dict()
                    go_on = optimizer.finish_update
        optimizer.zero_grad()
    return num_errors


def test_an_update_goes_on_after_any_operation_of_the_file_has_failed(tmp_path: Path) -> None:
    want = trained("adamw")
    network, optimizer, file = on_a_file(tmp_path)
    train(network, optimizer)
    for fail_at in range(1, file.num_operations + 1):
        network, optimizer, _ = on_a_file(tmp_path, fail_at=fail_at)
        assert train_through_errors(network, optimizer) == 1
        assert same((network, optimizer), want)


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.5)
def test_an_update_goes_on_after_any_copy_has_failed(home: Any, tmp_path: Path) -> None:
    want = trained("adamw")
    copier = AdversarialCopier()
    trained("adamw", home=home, disk=tmp_path, copier=copier)
    for fail_at in range(1, copier.num_operations + 1, 3):
        network = model()
        optimizer = offloaded(network, home=home, disk=tmp_path, copier=AdversarialCopier(fail_at=fail_at))
        num_errors = train_through_errors(network, optimizer)
        assert num_errors == 1
        assert same((network, optimizer), want)


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.5)
def test_an_interrupted_update_is_finished_or_refused(home: Any, tmp_path: Path) -> None:
    network, optimizer = trained("adamw", home=home, disk=tmp_path)
    assert isinstance(optimizer, OffloadedOptimizer)
    saved = as_saved((network, optimizer))
    backward(network, 4)
    gradients = [each.grad for each in network.parameters()]

    def begin() -> None:
        saved.seek(0)
        weights, state = torch.load(saved)
        network.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for each, gradient in zip(network.parameters(), gradients, strict=True):
            each.grad = gradient

    optimizer.step()
    want = torch.load(as_saved((network, optimizer)))
    num_finished = num_refused = 0
    for place in at_places(Interrupter("weights/optimizer", "hf_memopt/transfer"), begin, optimizer):
        if optimizer._update is None:
            begin()
            optimizer.step()
        elif optimizer._update.is_torn:
            num_refused += 1
            with pytest.raises(RuntimeError, match=r"load a checkpoint by load_state_dict\(\)"):
                optimizer.finish_update()
            begin()
            optimizer.step()
        else:
            num_finished += 1
            optimizer.finish_update()
        assert equal(network.state_dict(), want[0]), place
        assert equal(optimizer.state_dict(), want[1]), place
    assert num_finished > 10
    assert num_refused > 0


def at_places(interrupter: Interrupter, begin: Callable[[], None], optimizer: OffloadedOptimizer) -> Any:
    begin()
    interrupter.call(optimizer.step)
    count = interrupter.count
    for number in range(1, count + 1, max(1, count // 60)):
        begin()
        interrupter.call(optimizer.step, number)
        yield interrupter.place


def test_gradients_that_have_changed_do_not_finish_an_update(tmp_path: Path) -> None:
    network, optimizer, file = on_a_file(tmp_path)
    train(network, optimizer)
    backward(network, 4)
    file._fail_at = file.num_operations + 3
    with pytest.raises(DiskError):
        optimizer.step()
    optimizer.zero_grad()
    backward(network, 5)
    with pytest.raises(RuntimeError, match="gradients have changed since"):
        optimizer.finish_update()


def as_saved(found: tuple[nn.Module, optim.Optimizer]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save([found[0].state_dict(), found[1].state_dict()], file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("home", ["host", "file"])
def test_training_goes_on_from_either_state_dict(home: Any, kind: str, tmp_path: Path) -> None:
    plain = trained(kind)
    mine = trained(kind, home=home, disk=tmp_path)
    saved = [torch.load(as_saved(each)) for each in (mine, mine, plain)]
    train(*plain, range(4, 6))
    train(*mine, range(4, 6))
    assert same(mine, plain)
    for number, (weights, state) in enumerate(saved):
        network = model()
        network.load_state_dict(weights)
        optimizer: optim.Optimizer = MAKERS[kind](network.parameters())
        if number > 0:
            optimizer = OffloadedOptimizer(optimizer, home, disk=tmp_path)
        optimizer.load_state_dict(state)
        train(network, optimizer, range(4, 6))
        assert same((network, optimizer), plain)


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_state_dict_does_not_bring_the_state_back(home: Any, tmp_path: Path) -> None:
    network, optimizer = trained("adamw", home=home, disk=tmp_path)
    state = optimizer.state_dict()
    first = next(network.parameters())
    away = optimizer.optimizer.state[first]["exp_avg"]
    assert away is not state["state"][0]["exp_avg"]
    with pytest.raises(RuntimeError, match=r"is at home between updates; read it from `state_dict\(\)`"):
        away.sum()
    assert torch.equal(optimizer.state[first]["exp_avg"], state["state"][0]["exp_avg"])
    with pytest.raises(TypeError):
        optimizer.state[first] = {}
    save_file({"exp_avg": state["state"][0]["exp_avg"]}, tmp_path / "state.safetensors")
    assert torch.equal(load_file(tmp_path / "state.safetensors")["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.parametrize("home", ["host", "file"])
def test_state_may_be_written_in_place(home: Any, tmp_path: Path) -> None:
    found = trained("adamw"), trained("adamw", home=home, disk=tmp_path)
    for network, optimizer in found:
        for number in range(4, 7):
            first, *_, last = network.parameters()
            optimizer.state[first]["exp_avg"].mul_(0.5)
            optimizer.state_dict()["state"][0]["exp_avg_sq"][:1] = 0.25
            optimizer.state[last]["exp_avg"].zero_()
            train(network, optimizer, range(number, number + 1))
    assert same(*found)


def test_state_that_is_given_before_the_first_update_is_refused() -> None:
    network = model()
    optimizer = offloaded(network)
    optimizer.state[next(network.parameters())]["step"] = torch.tensor(1.0)
    assert not optimizer.state
    with pytest.raises(RuntimeError, match="was given other values"):
        optimizer.step()


@pytest.mark.parametrize("how", ["key", "new", "removed", "data"])
@pytest.mark.parametrize("home", ["host", "file"])
def test_state_that_is_replaced_is_refused(home: Any, how: str, tmp_path: Path) -> None:
    network, optimizer = trained("adamw", home=home, disk=tmp_path)
    saved = torch.load(as_saved((network, optimizer)))
    state = optimizer.state[next(network.parameters())]
    if how == "data":
        state["exp_avg"].data = torch.zeros_like(state["exp_avg"])
    elif how == "removed":
        del state["exp_avg"]
    else:
        state["exp_avg" if how == "key" else "mine"] = torch.zeros_like(state["exp_avg"])
    backward(network, 4)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"was given other values.*write into its tensors in place"):
            call()
    optimizer.load_state_dict(saved[1])
    optimizer.step()


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_state_dict_loads_into_the_optimizer_that_it_is_of(home: Any, tmp_path: Path) -> None:
    mine = trained("adamw", home=home, disk=tmp_path)
    mine[1].load_state_dict(mine[1].state_dict())
    plain = trained("adamw")
    assert same(mine, plain)
    train(*mine, range(4, 6))
    train(*plain, range(4, 6))
    assert same(mine, plain)


def test_a_state_dict_of_other_groups_changes_nothing(tmp_path: Path) -> None:
    mine = trained("adamw", home="file", disk=tmp_path)
    with pytest.raises(ValueError, match="doesn't match the size"):
        mine[1].load_state_dict(optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict())
    assert same(mine, trained("adamw"))


def test_loading_that_fails_changes_nothing(tmp_path: Path) -> None:
    network, optimizer, file = on_a_file(tmp_path)
    train(network, optimizer)
    other = torch.load(as_saved(trained("adam amsgrad")))[1]
    before = file.num_operations
    optimizer.load_state_dict(other)
    num_operations = file.num_operations - before
    assert num_operations > 5
    for operation in range(1, num_operations + 1):
        network, optimizer, file = on_a_file(tmp_path)
        train(network, optimizer)
        file._fail_at = file.num_operations + operation
        with pytest.raises(DiskError):
            optimizer.load_state_dict(other)
        assert same((network, optimizer), trained("adamw"))


def test_a_full_disk_is_noticed_before_anything_is_changed(tmp_path: Path) -> None:
    network, optimizer, _ = on_a_file(tmp_path, fail_at=3)
    before = [each.clone() for each in network.parameters()]
    backward(network, 0)
    with pytest.raises(DiskError, match="cannot take"):
        optimizer.step()
    assert equal(before, list(network.parameters()))
    assert not optimizer.optimizer.state
    optimizer.zero_grad()
    train(network, optimizer)
    assert same((network, optimizer), trained("adamw"))


@pytest.mark.parametrize("is_made_first", [False, True])
def test_schedulers_may_be_made_of_either_optimizer(is_made_first: bool, recwarn: pytest.WarningsRecorder) -> None:
    def run(home: Any) -> nn.Module:
        network = model()
        inner = optim.AdamW(network.parameters(), 0.1)
        made = optim.lr_scheduler.StepLR(inner, 1, 0.5) if is_made_first else None
        optimizer = inner if home is None else OffloadedOptimizer(inner, home)
        scheduler = made or optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(3):
            backward(network, number)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return network

    assert equal(run("host").state_dict(), run(None).state_dict())
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


def test_hooks_run_once_for_each_update() -> None:
    network = model()
    inner = optim.AdamW(network.parameters())
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer = OffloadedOptimizer(inner)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("any"))
    try:
        train(network, optimizer, range(2))
    finally:
        handle.remove()
    assert calls == ["before", "after", "any"] * 2


@pytest.mark.parametrize("kind", ["adamw", "adamw fused"])
def test_a_gradient_scaler_skips_the_same_updates(kind: str) -> None:
    def run(home: Any) -> tuple[list[float], Any]:
        network = model()
        optimizer: Any = MAKERS[kind](network.parameters())
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        scales = []
        for number in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = network(x).square().mean() * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, [network.state_dict(), optimizer.state_dict()]

    plain, mine = run(None), run("host")
    assert mine[0] == plain[0]
    assert equal(mine[1], plain[1])


def test_accelerate_prepares_it_and_saves_its_state(tmp_path: Path) -> None:
    def run(home: Any) -> nn.Module:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        network = model()
        optimizer: Any = optim.AdamW(network.parameters(), 1e-2)
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home, disk=tmp_path)
        network, optimizer = accelerator.prepare(network, optimizer)
        for number in range(8):
            if number == 4:
                accelerator.save_state(str(tmp_path / "state"))
            if number == 6:  # back to the fourth
                accelerator.load_state(str(tmp_path / "state"))
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            with accelerator.accumulate(network):
                accelerator.backward(network(x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(network.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return network

    assert equal(run("file").state_dict(), run(None).state_dict())


def test_groups_and_parameters_may_come_later(tmp_path: Path) -> None:
    def run(home: Any) -> Any:
        network = model()
        early, late = list(network[:3].parameters()), list(network[3:].parameters())
        late[0].requires_grad_(False)
        optimizer: Any = optim.AdamW(early, 1e-2)
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home, disk=tmp_path)
        train(network, optimizer, range(2))
        optimizer.add_param_group({"params": late, "weight_decay": 0.5})
        train(network, optimizer, range(2, 4))
        late[0].requires_grad_(True)
        train(network, optimizer, range(4, 6))
        return [network.state_dict(), optimizer.state_dict()]

    assert equal(run("file"), run(None))


def test_a_state_that_there_is_already_moves_with_the_first_update(tmp_path: Path) -> None:
    mine, plain = trained("adamw"), trained("adamw")
    mine = mine[0], OffloadedOptimizer(mine[1], "file", disk=tmp_path)
    assert same(mine, plain)
    train(*mine, range(4, 6))
    train(*plain, range(4, 6))
    assert same(mine, plain)
    assert mine[1].report().bytes_read == 2 * mine[1].report().state_bytes


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_budget_keeps_state_on_the_device(share: float) -> None:
    mine = trained("adamw", home="host", budget_gib=share * 1.01 * STATE_BYTES / GIB)
    assert same(mine, trained("adamw"))
    report = mine[1].report()
    assert share == 0.0 or 0.5 * share * STATE_BYTES < report.resident_bytes <= 1.01 * share * STATE_BYTES
    assert report.bytes_written == 4 * report.state_bytes
    assert report.bytes_read == 3 * report.state_bytes
    largest = 8 * 2 * WIDTH * WIDTH
    assert report.peak_bytes <= 2 * largest
    assert (report.state_bytes == 0) == (share == 1.0)


def test_the_report_names_bytes_and_wear(tmp_path: Path) -> None:
    text = str(trained("adamw", home="file", disk=tmp_path)[1].report())
    assert text.startswith("optimizer: 135.50 KiB of state in a file, ")
    assert "4 updates read 406.50 KiB and wrote 542.00 KiB, waited " in text
    assert "TB per day at this rate" in text


def test_the_file_goes_with_the_optimizer(tmp_path: Path) -> None:
    mine = trained("adamw", home="file", disk=tmp_path)
    saved = mine[1].state_dict()
    want = torch.load(as_saved(mine))[1]
    assert not list(tmp_path.iterdir())
    del mine
    gc.collect()
    assert equal(saved, want)  # mapped pages keep the file


def test_memory_of_the_state_is_free_between_visits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    optimizer = offloaded(network, home="file", disk=tmp_path)
    update, held = UpdateVisits.update, list[int]()

    def measured(visits: UpdateVisits, number: int, parameters: Any) -> None:
        update(visits, number, parameters)
        held.append(int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024)

    monkeypatch.setattr(UpdateVisits, "update", measured)
    for each in network.parameters():
        each.grad = torch.ones_like(each)
    for _ in range(3):
        optimizer.step()
    assert optimizer.report().state_bytes == 12 * 8 * MIB
    assert max(held) - held[0] < 48 * MIB  # state of two parameters, with temporaries and pages of threads


def test_verify_finds_the_update_equal(tmp_path: Path) -> None:
    network = model()
    plain = optim.AdamW(network.parameters(), 1e-2)
    mine = OffloadedOptimizer(optim.AdamW(network.parameters(), 1e-2), "file", disk=tmp_path)

    def step(optimizer: optim.Optimizer) -> None:
        network(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert verify(lambda: step(plain), lambda: step(mine)).verdict == "equal"


@pytest.mark.parametrize("how", ["norm", "mean", "distance"])
def test_optimizers_that_couple_parameters_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer=Coupled .*; keep its state on the device"):
        OffloadedOptimizer(Coupled(model().parameters(), how))


@pytest.mark.parametrize("how", ["none", "counter", "late counter"])
def test_counters_in_a_group_are_no_coupling(how: str) -> None:
    def run(home: Any) -> Any:
        network = model()
        groups = [{"params": each.parameters()} for each in network if list(each.parameters())]
        groups.append({"params": [nn.Parameter(torch.ones(3))]})
        optimizer: Any = Coupled(groups, how)
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home)
        train(network, optimizer)
        return [network.state_dict(), optimizer.state_dict()]

    assert equal(run("host"), run(None))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda each: optim.LBFGS(each), "LBFGS needs a closure in each step"),
        (lambda each: optim.SparseAdam(each), "SparseAdam does not support dense gradients"),
        (lambda each: optim.AdamW(each, capturable=True), "capturable=True of group 0 is for CUDA graphs"),
        (lambda each: OffloadedOptimizer(optim.AdamW(each)), "is an OffloadedOptimizer already"),
        (lambda each: Accelerator(cpu=True).prepare(optim.AdamW(each)), "before accelerator.prepare"),
        (lambda each: 3, "optimizer=int is no torch.optim.Optimizer"),
    ],
)
def test_optimizers_without_a_way_are_refused_by_name(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        OffloadedOptimizer(make(list(model().parameters())))


class Odd(optim.Optimizer):
    """Momentum, with `act` called for each parameter of each step."""

    def __init__(self, parameters: Any, act: Callable[["Odd", torch.Tensor, Any], Any]) -> None:
        self.act, self.count, self.others = act, 0, {}
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                if self.act is gives_gradients and each.grad is None:
                    each.grad = torch.zeros_like(each)
                if each.grad is not None:
                    state = self.state[each]
                    state["m"] = state.get("m", 0) * 0.9 + each.grad
                    self.act(self, each, state)
                    each.sub_(state["m"], alpha=self.param_groups[0]["lr"])


def gives_gradients(optimizer: Odd, each: torch.Tensor, state: Any) -> None:
    state["m"].mul_(1.1)


def counts(optimizer: Odd, each: torch.Tensor, state: Any) -> None:
    state["m"].mul_(2 if optimizer.count % 3 == 0 else 1)


def test_counters_in_attributes_and_options_of_another_group_are_no_coupling() -> None:
    def run(home: Any) -> Any:
        network = model()
        groups = [{"params": each.parameters(), "lr": 0.1 / (1 + n)} for n, each in enumerate(network) if n % 2 == 0]
        optimizer: Any = Odd(groups, counts)
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home)
        train(network, optimizer, range(6))
        return [network.state_dict(), optimizer.state_dict(), optimizer.count]

    assert equal(run("host"), run(None))


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (gives_gradients, "updates parameters that have no gradients"),
        (lambda o, p, state: o.others.update({id(p): state["m"]}), "keeps tensors of its state in attributes"),
        (lambda o, p, state: state.update(pair=(state["m"],)), "keeps state elsewhere than in dictionaries and lists"),
        (lambda o, p, s: s.update(n=o.others.setdefault("n", torch.ones(1))), "shares tensors of its state among"),
        (
            lambda o, p, s: s["m"].mul_(torch.stack([x.grad.isinf().any() for x in o.state]).any() + 1),
            "updates parameters by more",
        ),
    ],
)
def test_what_the_visits_cannot_repeat_is_refused_with_the_evidence(act: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer=Odd {complaint}.*; keep its state on the device"):
        OffloadedOptimizer(Odd(model().parameters(), act))


@pytest.mark.parametrize("attribute", ["parameters", "model", "inner"])
def test_an_optimizer_through_which_a_step_may_reach_others_is_refused(attribute: str) -> None:
    network = model()
    optimizer = optim.SGD(network.parameters())
    inside = {
        "parameters": optimizer.param_groups[0]["params"],
        "model": network,
        "inner": optim.SGD(network[0].parameters()),
    }
    optimizer.own = inside[attribute]
    with pytest.raises(ValueError, match=r"optimizer=SGD keeps parameters, a model or an optimizer in \.own"):
        OffloadedOptimizer(optimizer)


def test_a_replaced_step_is_refused() -> None:
    optimizer = optim.SGD(model().parameters())
    optimizer.step = lambda closure=None: None
    with pytest.raises(ValueError, match=r"optimizer=SGD has a replaced \.step"):
        OffloadedOptimizer(optimizer)


def test_a_group_that_couples_is_not_added() -> None:
    network = model()
    optimizer = OffloadedOptimizer(Coupled(network[0].parameters(), "none"))
    with pytest.raises(ValueError, match="by more than their own gradients"):
        optimizer.add_param_group({"params": list(network[2:].parameters()), "how": "mean"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_parameter_with_state_may_move_to_another_group(home: Any, tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        network, optimizer = trained("adamw", **options)
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [moved], "lr": 0.3})
        train(network, optimizer)
        return [network.state_dict(), optimizer.state_dict()]

    assert equal(run(home=home, disk=tmp_path), run())


def test_random_numbers_go_on_as_without_it() -> None:
    torch.manual_seed(7)
    want = torch.rand(3)
    seeded: list[int] = []
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        network = model()
        torch.manual_seed(7)
        seeded.clear()
        trained_by = offloaded(network)
        backward(network, 0)
        trained_by.step()
    assert torch.equal(torch.rand(3), want)
    assert not seeded


@pytest.mark.parametrize("budget_gib", [None, 1200 / GIB])
def test_updates_that_draw_random_numbers_keep_their_order(budget_gib: Any) -> None:
    def run(home: Any) -> Any:
        torch.manual_seed(3)
        network = nn.ParameterList([torch.ones(size) for size in (300, 50, 300, 40, 3000)])
        optimizer: Any = Odd(network, lambda o, p, state: state["m"].add_(torch.rand_like(p)))
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home, budget_gib=budget_gib)
        for number in range(4):
            for place, each in enumerate(network):
                each.grad = None if number < 2 and place == 1 else torch.ones_like(each)
            optimizer.step()
        return [list(network), optimizer.state_dict()]

    assert equal(run("host"), run(None))


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_state_dict_that_is_kept_outlives_loading(home: Any, tmp_path: Path) -> None:
    network, optimizer = trained("adamw", home=home, disk=tmp_path)
    best = optimizer.state_dict()
    want = torch.load(as_saved((network, optimizer)))[1]
    optimizer.load_state_dict(torch.load(as_saved(trained("adam amsgrad")))[1])
    train(network, optimizer, range(4, 6))
    assert equal(best, want)


def test_state_that_comes_later_moves_too() -> None:
    network = model()
    optimizer = OffloadedOptimizer(optim.SGD(network.parameters(), 0.1), "host")
    train(network, optimizer, range(2))
    assert optimizer.report().state_bytes == 0
    optimizer.param_groups[0]["momentum"] = 0.9
    train(network, optimizer, range(2, 4))
    assert optimizer.report().state_bytes > STATE_BYTES / 2
    assert optimizer.report().resident_bytes == 0


def test_attributes_set_from_outside_reach_the_optimizer() -> None:
    optimizer = OffloadedOptimizer(Odd(model().parameters(), counts))
    optimizer.count = 5
    assert optimizer.optimizer.count == 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"home": "disk"}, "home='disk' is unknown; use one of host, file"),
        ({"budget_gib": -1}, "budget_gib=-1 must be at least 0"),
        ({"disk": "missing"}, "disk='missing' is no folder"),
    ],
)
def test_wrong_options_are_refused(options: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        offloaded(model(), **options)


def test_closures_and_sparse_gradients_are_refused_before_anything_changes() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = OffloadedOptimizer(optim.SGD(table.parameters(), 0.1))
    before = table.weight.clone()
    with pytest.raises(ValueError, match="closure is not supported by OffloadedOptimizer"):
        optimizer.step(lambda: 1.0)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradients are not supported"):
        optimizer.step()
    assert torch.equal(table.weight, before)


def test_one_that_is_copied_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        torch.save(offloaded(model()), io.BytesIO())


def test_state_whose_tensors_are_exchanged_or_change_their_shape(tmp_path: Path) -> None:
    class Restless(optim.Optimizer):
        """Swaps two tensors in each update, makes one anew, and lengthens a list."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for each in self.param_groups[0]["params"]:
                state = self.state[each]
                if not state:
                    state.update(a=torch.zeros_like(each), b=torch.ones_like(each), history=[])
                state["a"], state["b"] = state["b"], state["a"]
                state["a"] = state["a"] * 0.9 + each.grad
                state["b"].data = state["b"] * 0.5
                state["history"].append(each.grad.flatten()[:3].clone())
                each.sub_(0.01 * state["a"] + 0.001 * state["b"] + sum(part.sum() for part in state["history"]))

    def run(home: Any) -> Any:
        network = model()
        optimizer: Any = Restless(network.parameters())
        if home is not None:
            optimizer = OffloadedOptimizer(optimizer, home, disk=tmp_path, copier=AdversarialCopier("random"))
        train(network, optimizer)
        return [network.state_dict(), optimizer.state_dict()]

    assert equal(run("file"), run(None))
    assert equal(run("host"), run(None))
