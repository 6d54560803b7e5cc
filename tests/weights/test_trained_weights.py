"""Tests of weights that stream while they train, and whose gradients live at home."""

import copy
import errno
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from architectures import ARCHITECTURES
from optimizer_toys import MAKERS, equal
from own_architectures import OWN_ARCHITECTURES
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained_toys import Training, are_equal, gradients, loss_of, network, trained

from hf_memopt import OffloadedOptimizer, StreamedWeights
from hf_memopt.transfer.scratch_file import DiskError
from hf_memopt.weights.base import streamed_weights_of
from hf_memopt.weights.gradients import AwayGradient

HOMES = ["host", "file", "host by copies", "file by copies"]


def options_of(home: str, folder: Path) -> dict[str, Any]:
    """Return the home, and a copier as unhelpful as may be where bytes go through one."""
    options: dict[str, Any] = {"home": home.split()[0], "disk": folder}
    return options | ({"copier": AdversarialCopier("random")} if "copies" in home else {})


# Each pair of values of two columns is in one of the rows.
def pairwise(**values: list[Any]) -> list[tuple[Any, ...]]:
    names = list(values)
    left = {
        (one, other, x, y)
        for one, other in itertools.combinations(range(len(names)), 2)
        for x in values[names[one]]
        for y in values[names[other]]
    }
    rows = []
    every = list(itertools.product(*values.values()))
    while left:
        row = max(every, key=lambda row: sum((a, b, row[a], row[b]) in left for a, b in pairs(row)))
        rows.append(row)
        left -= {(a, b, row[a], row[b]) for a, b in pairs(row)}
    return rows


def pairs(row: tuple[Any, ...]) -> Any:
    return itertools.combinations(range(len(row)), 2)


CELLS = pairwise(
    kind=["adamw", "adamw foreach", "adamw fused", "sgd", "adafactor", "rmsprop foreach"],
    checkpointing=["none", "reentrant", "non-reentrant"],
    precision=["float32", "bfloat16", "autocast"],
    home=HOMES,
)


@pytest.mark.parametrize(("kind", "checkpointing", "precision", "home"), CELLS)
@pytest.mark.sweep(share=0.15)
def test_training_is_that_of_plain_weights(
    kind: str, checkpointing: str, precision: str, home: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    settings: dict[str, Any] = {"kind": kind, "autocast": precision == "autocast"}
    settings["make"] = lambda: network(checkpointing, dtype)
    assert are_equal(trained(**settings, **options_of(home, tmp_path)), trained(**settings))


ALL = ARCHITECTURES | OWN_ARCHITECTURES
MODELS = ["llama", "qwen3_moe", "gemma2", "albert", "t5", "vit", "whisper", "mamba", "unet2d_condition", "dit"]


def architecture(name: str, checkpointing: bool) -> tuple[nn.Module, Callable[..., Tensor]]:
    workload = ALL[name].build()
    if checkpointing:
        workload.checkpoint()

    def loss_of(model: nn.Module, number: int, autocast: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return workload.loss()

    return workload.module, loss_of


def is_equal_for(name: str, checkpointing: bool, autocast: bool, kind: str, home: dict[str, Any]) -> bool:
    def run(options: dict[str, Any]) -> Training:
        module, loss_of = architecture(name, checkpointing)
        return trained(
            num_updates=2, make=lambda: module, loss_of=loss_of, autocast=autocast, kind=kind, max_norm=0.5, **options
        )

    return are_equal(run(home), run({}))


@pytest.mark.sweep(share=0.2)
@pytest.mark.parametrize("name", MODELS)
def test_architectures_train_as_plain(name: str, tmp_path: Path) -> None:
    place = MODELS.index(name)
    checkpointing = ALL[name].can_checkpoint and place % 2 == 0
    home = options_of(HOMES[place % len(HOMES)], tmp_path)
    assert is_equal_for(name, checkpointing, autocast=place % 3 == 0, kind="adamw", home=home)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.sweep(share=1 / 100)
@pytest.mark.parametrize("seed", range(300))
def test_any_architecture_trains_as_plain(seed: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(seed)

    def one_of(found: Any) -> Any:
        every = list(found)
        return every[int(torch.randint(len(every), (), generator=draw))]

    name = one_of(each for each in ALL if "graph" not in each)  # whose state dicts hold sparse tensors
    checkpointing = ALL[name].can_checkpoint and one_of([False, True])
    home = options_of(one_of(HOMES), tmp_path)
    is_complex = any(each.is_complex() for each in ALL[name].build().module.parameters())
    # torch's Adafactor and fused kernels take no complex weights.
    kinds = [each for each in MAKERS if not is_complex or ("fused" not in each and each != "adafactor")]
    assert is_equal_for(name, checkpointing, one_of([False, True]), one_of(kinds), home)


# ------------------------------------------------------------------------------------------ what a training may do


def with_penalty(model: nn.Module, number: int, autocast: bool) -> Tensor:
    """Read weights outside of their modules."""
    return loss_of(model, number) + sum(each.pow(2).sum() for each in model.parameters()) * 1e-4


def with_graph(model: nn.Module, number: int, autocast: bool) -> Tensor:
    """Add a penalty on gradients, which records a graph of the backward pass."""
    loss = loss_of(model, number)
    weights = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    return loss + 0.1 * sum(each.square().sum() for each in found if each is not None)


def with_early_backward(model: nn.Module, number: int, autocast: bool) -> Tensor:
    """Run backward twice on one graph."""
    loss = loss_of(model, number)
    loss.backward(retain_graph=True)
    return loss


def with_evaluation(model: nn.Module, number: int, autocast: bool) -> Tensor:
    model.eval()
    with torch.no_grad():
        before = loss_of(model, number + 1)
    model.train()
    return loss_of(model, number) * before


def with_functions(model: Any, number: int, autocast: bool) -> Tensor:
    """Hand weights to functions, under autocast before and after their modules have used the cached cast."""
    with torch.autocast("cpu", torch.bfloat16):
        before = nn.functional.linear(torch.ones(3, 32), model.narrow.weight).mean()
        loss = loss_of(model, number, True)
        after = nn.functional.linear(torch.ones(3, 64), model.back.weight).mean() + model.wide.weight.norm()
    return loss + before.float() + after.float()


def with_two_passes(model: Any, number: int, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            other = loss_of(model, number + 1, True)
        return loss_of(model, number, True) + other + loss_of(model, number + 2, True)


def with_a_look(model: Any, number: int, autocast: bool) -> Tensor:
    """Read all weights from outside between forward and backward."""
    loss = loss_of(model, number, True)
    weights = streamed_weights_of(model)
    with nullcontext() if weights is None else weights.visit(model):
        assert all(each.isfinite().all() for each in model.parameters())
    return loss


def with_inputs(model: Any, number: int, autocast: bool) -> Tensor:
    """Ask for gradients of some weights, which need not be there."""
    loss = loss_of(model, number)
    loss.backward(inputs=[model.back.weight], retain_graph=True)
    (found,) = torch.autograd.grad(loss, model.wide.weight, retain_graph=True)
    return loss + found.norm() * 0


@pytest.mark.parametrize("home", ["host by copies", "file"])
@pytest.mark.parametrize(
    "loss",
    [
        with_penalty,
        with_graph,
        with_early_backward,
        with_evaluation,
        with_functions,
        with_a_look,
        with_two_passes,
        with_inputs,
    ],
)
@pytest.mark.sweep(share=0.25)
def test_losses_of_all_kinds(loss: Any, home: str, tmp_path: Path) -> None:
    assert are_equal(trained(loss_of=loss, **options_of(home, tmp_path)), trained(loss_of=loss))


def spectral(model: Any) -> Any:
    nn.utils.parametrizations.spectral_norm(model.wide)
    return model


def weight_norm(model: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model.back)
    return model


def half_frozen(model: Any) -> Any:
    for number, each in enumerate(model.parameters()):
        each.requires_grad_(number % 2 == 0)
    return model


def compiled(model: Any) -> Any:
    model.back.compile(backend="aot_eager")
    return model


def without_small_ones(model: Any) -> Any:
    return nn.Sequential(nn.Embedding(200, 64, padding_idx=-1, scale_grad_by_freq=True), nn.Linear(64, 200))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("home", ["host by copies", "file"])
@pytest.mark.parametrize("change", [spectral, weight_norm, half_frozen, compiled, without_small_ones])
@pytest.mark.sweep(share=0.25)
def test_models_of_all_kinds(change: Any, home: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = change(network())
        return model

    assert are_equal(trained(make=make, **options_of(home, tmp_path)), trained(make=make))


def test_the_files_of_a_checkpoint_are_read_and_never_written(tmp_path: Path) -> None:
    save_file({name: each for name, each in network().state_dict().items() if name != "head.weight"}, tmp_path / "a")
    path = (tmp_path / "a").rename(tmp_path / "model.safetensors")
    before = path.read_bytes()
    found = trained("file", files=[path], disk=tmp_path)
    assert found.weights is not None
    assert path in [Path(each.name) for each in found.weights._home._block.files]
    assert are_equal(found, trained())
    assert path.read_bytes() == before


def test_a_checkpoint_may_be_saved_over_the_one_that_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: each for name, each in network().state_dict().items() if name != "head.weight"}, path)
    found = trained("file", 1, files=[path], disk=tmp_path)
    save_file({name: each for name, each in found.model.state_dict().items() if name != "head.weight"}, path)
    for number in (1, 2, 3):
        found.update(number)
    assert are_equal(found, trained(num_updates=4))


@pytest.mark.parametrize("is_saved_by_plain", [False, True])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.sweep(share=0.25)
def test_training_goes_on_from_a_checkpoint(home: str, is_saved_by_plain: bool, tmp_path: Path) -> None:
    saved = trained(num_updates=2, **({} if is_saved_by_plain else options_of(home, tmp_path)))
    weights = {name: each.contiguous() for name, each in saved.model.state_dict().items() if name != "head.weight"}
    save_file(weights, tmp_path / "weights")
    torch.save(saved.optimizer.state_dict(), tmp_path / "state")
    found = trained(num_updates=1, **options_of(home, tmp_path))  # every block has been written
    missing = found.model.load_state_dict(load_file(tmp_path / "weights"), strict=False)
    assert missing.missing_keys == ["head.weight"]
    found.optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    found.found = []
    for number in (2, 3):
        found.update(number)
    want = trained(num_updates=4)
    want.found = want.found[6:]
    assert are_equal(found, want)


def test_other_shapes_and_assignments_are_refused(tmp_path: Path) -> None:
    model = trained("file", 1, disk=tmp_path).model
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for narrow.weight.*\[16, 32\]"):
        model.load_state_dict({**before, "narrow.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r"'table.weight' cannot be replaced.*assign=False"):
        model.load_state_dict(before, assign=True)


@pytest.mark.parametrize("home", HOMES)
def test_a_visit_reads_and_writes_from_outside(home: str, tmp_path: Path) -> None:
    def run(options: dict[str, Any]) -> list[Any]:
        training, average = trained(num_updates=0, **options), network()
        for number in range(3):
            training.update(number)
            with training.weights.visit(training.model) if training.weights else torch.no_grad(), torch.no_grad():
                for mean, each in zip(average.parameters(), training.model.parameters(), strict=True):
                    mean.lerp_(each, 0.5)
                training.model.back.weight.clamp_(-0.05, 0.05)
                training.model.wide.weight.data.mul_(1.01)
                training.model.narrow.weight.grad = torch.ones_like(training.model.narrow.weight)
                torch.optim.AdamW([training.model.narrow.weight], fused=True).step()  # torch counts no write
                training.model.narrow.weight.grad = None
                vector = nn.utils.parameters_to_vector(training.model.twice.parameters())
                nn.utils.vector_to_parameters(vector * 0.99, training.model.twice.parameters())
                copied = copy.deepcopy(training.model)
            training.found.append(copied.state_dict())
        return [*training.results(), average.state_dict()]

    assert equal(run(options_of(home, tmp_path)), run({}))


def test_weights_that_are_away_say_so() -> None:
    training = trained("host", 1)
    complaint = r"weight 'back.weight' is away.*adopt\(optimizer\).*weights.visit"
    for act in (lambda weight: weight.norm(), lambda weight: weight.data.zero_(), copy.deepcopy):
        with pytest.raises(RuntimeError, match=complaint if act is not copy.deepcopy else "cannot be copied"):
            act(training.model.back.weight)
    training.backward(1)
    with pytest.raises(RuntimeError, match=r"is away.*adopt\(optimizer\)"):
        torch.optim.SGD(training.model.parameters(), 0.1).step()


def test_a_second_backward_of_an_old_graph_raises() -> None:
    training = Training(network(), "host").start()
    assert training.weights is not None
    with training.weights.stream():
        loss = loss_of(training.model, 0)
    loss.backward(retain_graph=True)
    training.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_are_unfrozen_later_have_gradients_at_home(tmp_path: Path) -> None:
    def run(options: dict[str, Any]) -> Training:
        training = trained(make=lambda: half_frozen(network()), **options)
        training.model.requires_grad_(True)
        known = set(map(id, training.optimizer.param_groups[0]["params"]))
        others = [each for each in training.model.parameters() if id(each) not in known]
        training.optimizer.add_param_group({"params": others})
        return training.run(2)

    found = run(options_of("file", tmp_path))
    assert are_equal(found, run({}))
    found.backward(5)
    assert all(isinstance(each, AwayGradient) for each in gradients(found.model))


def test_scales_and_zeroed_gradients(tmp_path: Path) -> None:
    def run(options: dict[str, Any]) -> Training:
        training = trained(num_updates=0, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number in range(4):
            with training.weights.stream() if training.weights else torch.enable_grad():
                loss = loss_of(training.model, number)
            scaler.scale(loss if number != 2 else loss * torch.inf).backward()
            scaler.unscale_(training.optimizer)
            training.found.append(nn.utils.clip_grad_norm_(training.model.parameters(), 0.1))
            scaler.step(training.optimizer)
            scaler.update()
            training.found.append(torch.tensor(scaler.get_scale()))
            training.optimizer.zero_grad(set_to_none=number % 2 == 0)
        return training

    found, want = run(options_of("file", tmp_path)), run({})
    assert torch.equal(torch.stack(found.found).nan_to_num(), torch.stack(want.found).nan_to_num())
    assert equal(found.results()[-2:], want.results()[-2:])


@pytest.mark.parametrize("is_made_first", [False, True])
def test_schedulers_and_methods_of_the_adopted_optimizer(is_made_first: bool, recwarn: pytest.WarningsRecorder) -> None:
    def run(home: str) -> Training:
        training = Training(network(), home)
        training.model.train()
        weights = StreamedWeights(training.model, home="host", trained=True, device="cpu") if home else None
        optimizer = torch.optim.AdamW(training.model.parameters(), 0.1)
        if is_made_first:
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        if weights is not None:
            adopted = weights.adopt(optimizer)
            assert isinstance(adopted, OffloadedOptimizer)
            assert adopted.optimizer is optimizer
        if not is_made_first:
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        training.weights, training.optimizer, training.found = weights, optimizer, []
        for number in range(3):
            training.update(number)
            schedule.step()
        return training

    assert are_equal(run("host"), run(""))
    assert not recwarn.list


def test_a_wrapped_optimizer_may_be_adopted(tmp_path: Path) -> None:
    training = Training(network(), "file")
    training.weights = StreamedWeights(training.model, home="file", trained=True, device="cpu", disk=tmp_path)
    training.optimizer = OffloadedOptimizer(MAKERS["adamw"](training.model.parameters()), home="host")
    assert training.weights.adopt(training.optimizer) is training.optimizer
    training.found = []
    assert are_equal(training.run(), trained())


@pytest.mark.parametrize("home", HOMES)
def test_removing_leaves_a_plain_model_and_plain_gradients(home: str, tmp_path: Path) -> None:
    training = trained(**options_of(home, tmp_path))
    training.backward(3)
    assert training.weights is not None
    training.weights.remove()
    want = trained()
    want.backward(3)
    assert all(type(each) is Tensor for each in gradients(training.model))
    assert equal(list(gradients(training.model)), list(gradients(want.model)))
    assert equal(list(training.model.parameters()), list(want.model.parameters()))


def test_a_full_disk_is_noticed_by_adopt(tmp_path: Path) -> None:
    model = network()
    weights = StreamedWeights(model, home="file", trained=True, device="cpu", disk=tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    weights.adopt(optimizer)
    file = weights._gradients.home.file
    assert file.space.bytes_live >= 2 * sum(each.nbytes for each in model.parameters() if each.numel() > 100)

    def full(num_bytes: int) -> None:
        raise DiskError(errno.ENOSPC, "disk: no room")

    file.space._resize = full
    training = Training(model, "file")
    training.weights, training.optimizer, training.found = weights, optimizer, []
    training.backward(0)  # takes nothing more


def test_the_peak_is_that_of_visits(tmp_path: Path) -> None:
    training = trained(**options_of("file", tmp_path))
    assert training.weights is not None
    report = training.weights.report()
    largest = max(each.nbytes for each in training.model.parameters())
    assert report.device_bytes == 0
    assert report.peak_device_bytes <= 2 * largest + 4096


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda model: StreamedWeights(model, home="host").adopt(torch.optim.SGD(model.parameters())), "trained=True"),
        (lambda model: StreamedWeights(model.requires_grad_(False), trained=True), "no weights that train"),
    ],
)
def test_what_cannot_train_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make(half_frozen(network()))


class InBackward(Training):
    """Training whose update runs in the last backward pass."""

    def backward(self, number: int) -> None:
        for micro_batch in range(2):
            torch.manual_seed(10 * number + micro_batch)
            is_early = self.adopted is not None and micro_batch == 1
            with self.weights.stream() if self.weights else nullcontext():
                loss = self.loss_of(self.model, 10 * number + micro_batch, self.autocast)
            with self.adopted.update_in_backward() if is_early else nullcontext():
                loss.backward()
            self.found.append(loss.detach())


@pytest.mark.sweep(share=1 / 10)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd foreach"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_an_update_in_backward_is_that_of_step(checkpointing: str, kind: str, home: str, tmp_path: Path) -> None:
    def run(options: dict[str, Any]) -> Training:
        own = {"home": options.pop("home", "")}
        return InBackward(network(checkpointing), kind=kind, max_norm=None, **own).start(**options).run(4)

    found = run(options_of(home, tmp_path))
    assert are_equal(found, run({}))


class Constant(nn.Module):
    """The last layer but one is a constant in an early part, which backward reaches when its gradient is there."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.checkpointing, self.use = checkpointing, "detached"

    def _early(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.use == "detached":
            return torch.tanh(nn.functional.linear(x, self.again.weight.detach()))
        if self.use == "called":
            with torch.no_grad():
                factor = self.again(x)
            return x * factor
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            x = self._early(x)
        else:
            x = checkpoint(self._early, x, use_reentrant=self.checkpointing == "reentrant")
        return self.last(torch.tanh(self.again(x)))


def of_constant(model: nn.Module, number: int, autocast: bool) -> Tensor:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).requires_grad_()
    return model(x).square().mean()


@pytest.mark.parametrize("kind", ["adamw", "adamw fused"])
@pytest.mark.parametrize("use", ["detached", "called"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_a_weight_that_backward_needs_later_is_updated_by_step(checkpointing: str, use: str, kind: str) -> None:
    def run(home: str) -> Training:
        torch.manual_seed(0)
        model = Constant(checkpointing)
        model.use = use
        training = InBackward(model, home, kind=kind, max_norm=None, loss_of=of_constant)
        return training.start().run(4)

    found = run("host")
    assert are_equal(found, run(""))
    assert found.adopted is not None
    model: Any = found.model
    assert found.adopted.weights.at_once >= {model.last.weight}
    is_needed = use == "detached" or checkpointing != "none"
    assert (model.again.weight in found.adopted.weights.at_once) is not is_needed


def test_a_backward_that_needs_updated_weights_as_no_earlier_one_raises() -> None:
    model = Constant("non-reentrant")
    training = InBackward(model, "host", kind="adamw fused", max_norm=None, loss_of=of_constant).start()
    model.use = "none"
    training.run(3)
    model.use = "called"
    with pytest.raises(RuntimeError, match=r"weight 'again.weight' is needed again in a backward pass"):
        training.update(3)


def test_an_update_in_backward_moves_weights_and_gradients_once_less(tmp_path: Path) -> None:
    read, written = [], []
    for kind in (InBackward, Training):
        training = kind(network(), "file", max_norm=None).start(disk=tmp_path).run(3)
        before = training.weights.report().bytes_to_device, training.weights._gradients.bytes_written
        training.update(3)
        read.append(training.weights.report().bytes_to_device - before[0])
        written.append(training.weights._gradients.bytes_written - before[1])
    assert read[0] < read[1]
    assert written[0] < 0.6 * written[1]


def test_what_an_update_in_backward_has_used_is_gone() -> None:
    training = InBackward(network(), "host", max_norm=None).start().run(2)
    training.backward(3)
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), torch.inf)  # for logs
    assert norm > 0.1
    for act in (lambda each: each.sum(), lambda each: each.norm(1), lambda each: each.mul_(2)):
        with pytest.raises(RuntimeError, match=r"gradient of 'back.weight' is gone.*update_in_backward\(\)"):
            act(training.model.back.weight.grad)
    with pytest.raises(RuntimeError, match="is gone"):
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="options of AdamW were changed after"):
        training.optimizer.step()


def replace_a_gradient(training: Training) -> None:
    training.model.back.weight.grad = None
    training.optimizer.step()


def change_a_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"].mul_(0.5)
    training.optimizer.step()


def leave_out_the_step(training: Training) -> None:
    with pytest.raises(RuntimeError, match=r"no update was interrupted; call step\(\)"):
        training.adopted.finish_update()
    with training.adopted.update_in_backward():
        pass


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (replace_a_gradient, "gradients were replaced after update_in_backward"),
        (change_a_rate, "options of AdamW were changed after"),
        (leave_out_the_step, r"has begun an update; call step\(\)"),
    ],
)
def test_what_comes_between_backward_and_its_step_is_refused(act: Any, complaint: str) -> None:
    training = InBackward(network(), "host", max_norm=None).start()
    training.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    training.run(2).backward(3)
    with pytest.raises(RuntimeError, match=complaint):
        act(training)


def test_an_error_in_a_backward_that_updates_is_not_passed_over() -> None:
    training = InBackward(network(), "host", max_norm=None).start().run(2)
    calls = iter([None, ZeroDivisionError])

    def fail(gradient: Tensor) -> None:
        for error in filter(None, [next(calls)]):
            raise error

    training.model.narrow.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        training.backward(3)
    for act in (training.optimizer.step, training.adopted.finish_update):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            act()
    with pytest.raises(ValueError, match=r"update_in_backward\(\) needs weights with a home"):
        with OffloadedOptimizer(torch.optim.SGD(network().parameters())).update_in_backward():
            pass


def chunked() -> nn.Module:
    """Return a model whose parameters are parts of one tensor, and count writes together."""
    torch.manual_seed(0)
    model, (first, second) = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(128, 64).chunk(2)
    model[0].weight, model[1].weight = nn.Parameter(first), nn.Parameter(second)
    return model


def test_parameters_that_are_parts_of_one_tensor(tmp_path: Path) -> None:
    def loss(model: nn.Module, number: int, autocast: bool) -> Tensor:
        joined = torch.cat([each.weight for each in model])  # its gradient is one tensor, too
        return model(torch.ones(2, 64)).square().mean() + joined.square().mean()

    settings: dict[str, Any] = {"make": chunked, "loss_of": loss}
    assert are_equal(trained(**settings, **options_of("file", tmp_path)), trained(**settings))


@pytest.mark.parametrize("home", ["host", "file"])
def test_a_state_dict_follows_updates_and_keeps_ties(home: str, tmp_path: Path) -> None:
    training, want = trained(home, 0, disk=tmp_path), trained(num_updates=0)
    found, plain = training.model.state_dict(), want.model.state_dict()
    training.update(0)
    want.update(0)
    with torch.no_grad():
        assert equal(found, plain)
    assert found["table.weight"].data_ptr() == found["head.weight"].data_ptr()
    found["back.weight"].zero_()
    training.model.load_state_dict(found)
    assert not training.model.state_dict()["back.weight"].any()
    training.update(1)
    without_tie = {name: each.clone() for name, each in training.model.state_dict().items() if name != "head.weight"}
    training.model.load_state_dict(without_tie, strict=False)
    training.update(2)


def test_an_optimizer_may_be_adopted_again_after_removing() -> None:
    def run(home: str) -> Training:
        training = trained(home, 1)
        if training.weights is not None:
            training.weights.remove()
            training.weights = None
        training.update(1)
        if home:
            training.weights = StreamedWeights(training.model, home="host", trained=True, device="cpu")
            training.weights.adopt(training.optimizer)
        training.update(2)
        return training

    assert are_equal(run("host"), run(""))


def test_one_optimizer_of_two_models_is_refused() -> None:
    one, other = (StreamedWeights(network(), home="host", trained=True, device="cpu") for _ in range(2))
    parameters = [*one._model.parameters(), *other._model.parameters()]
    with pytest.raises(ValueError, match="weights of two models that stream"):
        one.adopt(torch.optim.SGD(parameters))


def test_autocast_around_an_update_is_refused() -> None:
    training = Training(network(), "host", autocast=True).start()
    with pytest.raises(RuntimeError, match=r"weight '.*' was written inside of autocast.*leave autocast"):
        with torch.autocast("cpu", torch.bfloat16):
            training.run(2)
