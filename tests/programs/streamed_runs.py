"""Runs programs plainly and with streamed weights, in forked processes, and compares them bit by bit."""

import faulthandler
import gc
import os
import pickle
import re
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from adversarial_copier import AdversarialCopier
from patience import HANG_S
from streamed_parts import FOR_THREADS, ROWS, WIDTH, BombError, Model
from streamed_programs import Program, Step, smaller
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt import StreamedWeights
from hf_memopt.units import GIB

# What a message that names a weight tells the user to do.
_REMEDY = re.compile(r"remove\(\)|visit\(|stream\(\)|freez|call |read |copy |clone")


class Result(NamedTuple):
    """The outcome of a program: "equal", "refused", "says nothing", or a kind of failure, with details.

    Refused is a program whose error names the weight and a remedy, if something in it is `REFUSABLE`.
    """

    outcome: str
    details: str = ""

    @property
    def is_failure(self) -> bool:
        return self.outcome not in ("equal", "refused", "says nothing")


class Run:
    """One run of a program. `seen` has its results by name, and `error` the step and the exception that ended it."""

    def __init__(self, program: Program) -> None:
        torch.default_generator.manual_seed(program.seed)  # `torch.manual_seed` takes longer than most steps
        self.program = program
        bombed = {step.at % len(program.parts) for step in program.steps if step.fails}
        self.model = Model(program.parts, frozenset(bombed))
        self.trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self.seen: dict[str, Tensor] = {}
        self.error: tuple[int, Exception] | None = None
        self._left_over: list[Tensor] = []

    def go(self, stream: Callable[[str], AbstractContextManager[object]]) -> None:
        for number, step in enumerate(self.program.steps):
            try:
                self._step(number, step, stream)
            except Exception as error:
                self.error = number, error.with_traceback(None)
                break
        self._left_over.clear()
        self.note_all("at the end", self.trained.items())
        self.note_all("at the end", self.model.named_buffers())

    def note_all(self, when: str, named: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in named:
            if tensor is not None:
                self.seen[f"{name} {when}"] = tensor.detach().clone()

    def _step(self, number: int, step: Step, stream: Callable[[str], AbstractContextManager[object]]) -> None:
        when, part = f"in step {number}", step.at % len(self.program.parts)
        self.model.moment.step, self.model.moment.bomb = number, None
        torch.default_generator.manual_seed(number)
        x = torch.randn(2, ROWS, WIDTH, requires_grad=True)
        self.model.train(step.grads != "eval")
        with torch.set_grad_enabled(step.grads == "train"):
            if step.before:
                self.note_all(f"before {when}", _BEFORE[step.before](self.model, self.model.places[part], x.detach()))
            if step.fails:
                kind = KeyboardInterrupt if "Ctrl-C" in step.fails else BombError
                self.model.moment.bomb = step.fails.partition(" ")[0], part, kind
            try:
                with stream(step.path), self._beside(step, x.detach(), when):
                    loss = self._loss(step, x)
                    self.note_all(when, [("loss", loss)])
                    if step.backward == "inside" and loss.requires_grad:
                        loss.backward()
                        self._update(when, x)
                if step.backward != "inside" and loss.requires_grad:
                    self._backward(step, loss, x)
            except (BombError, KeyboardInterrupt):
                self._left_over.clear()
                self.model.zero_grad()
                return
        self._update(when, x)

    @torch.no_grad()
    def _update(self, when: str, x: Tensor) -> None:
        self.note_all(when, [("gradient of x", x.grad)])
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.note_all(when, [(f"gradient of {name}", parameter.grad)])
                parameter.sub_(parameter.grad, alpha=0.05)
        self.model.zero_grad()

    def _loss(self, step: Step, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(step.autocast)):
            y = self.model(x)
            loss = y.float().square().mean()
            for more in self.model.in_loss(y):
                loss = loss + more.float()
        return loss

    def _backward(self, step: Step, loss: Tensor, x: Tensor) -> None:
        if step.backward in ("never", "with the next"):
            self._left_over += [loss] * (step.backward == "with the next")
            return
        loss = sum(self._left_over, loss)
        self._left_over.clear()
        if step.backward == "grad":
            for parameter, gradient in zip(
                self.trained, torch.autograd.grad(loss, self.trained, allow_unused=True), strict=True
            ):
                parameter.grad = gradient
            return
        if step.backward == "double":
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
            loss = loss if gradient is None else loss + gradient.square().sum()
        loss.backward(retain_graph=step.backward == "twice")
        if step.backward == "twice":
            loss.backward()

    @contextmanager
    def _beside(self, step: Step, x: Tensor, when: str) -> Iterator[None]:
        """Have another thread evaluate the parts that hold no state."""
        seen: list[Any] = []
        plain = [p for p in self.model.places if p.part.kind in FOR_THREADS and p.part == type(p.part)(p.part.kind)]
        if not step.thread or not plain or step.fails:
            yield
            return

        def evaluate() -> None:
            try:
                for _ in range(20):
                    y = x
                    with torch.no_grad():
                        for place in plain:
                            y = place(y)
                    seen.append(y)
            except Exception as error:
                seen.append(error)

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if isinstance(seen[-1], Exception):
            raise seen[-1]
        self.note_all(when, [(f"evaluation {number} in the thread", y) for number, y in enumerate(seen)])


@torch.no_grad()
def _each(place: Any, change: Callable[[Tensor], object]) -> list[tuple[str, Any]]:
    for parameter in filter(torch.is_floating_point, place.parameters()):
        change(parameter)
    return []


# What happens before a step, outside of `stream()`.
_BEFORE: dict[str, Callable[[Model, Any, Tensor], Any]] = {
    "unfreeze": lambda model, place, x: _each(place, lambda each: each.requires_grad_()),
    "freeze": lambda model, place, x: place.requires_grad_(False) and [],
    "write": lambda model, place, x: _each(place, lambda each: each.mul_(0.5)),
    "clone": lambda model, place, x: [(n, p.detach().clone()) for n, p in place.named_parameters()],
    "copy": lambda model, place, x: [(n, torch.empty_like(p).copy_(p.detach())) for n, p in place.named_parameters()],
    "state_dict": lambda model, place, x: list(model.state_dict().items()),
    "call": lambda model, place, x: [("call", place(x + 0))],
    "forward outside of stream": lambda model, place, x: [("model", model(x + 0))],
}


def _streamed(program: Program, model: Model, disk: str) -> StreamedWeights:
    num_bytes = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    base = StreamedWeights(
        model,
        home=program.home,  # type: ignore[arg-type]
        device="cpu",
        budget_gib=float(program.budget) * num_bytes / GIB if program.budget else None,
        copier=AdversarialCopier(program.copier, program.seed) if program.copier else None,
        disk=disk,
    )
    model.moment.visit = base.visit
    return base


def check(program: Program, disk: str) -> Result:
    """Compare the streamed run with the plain one."""
    want, got = Run(program), Run(program)
    want.go(lambda path: nullcontext())
    if not all(bool(tensor.isfinite().all()) for tensor in want.seen.values()):
        return Result("says nothing", "plain results are not finite")
    sources = {StorageWeakRef(p.untyped_storage()): p.nbytes for p in got.model.parameters() if not p.requires_grad}
    try:
        base = _streamed(program, got.model, disk)
    except (RuntimeError, ValueError) as error:
        return _of_error(program, got, (-1, error), want)
    got.go(base.stream)
    names = want.seen if got.error is None else [name for name in got.seen if "at the end" not in name]
    for name in names:
        if not _same(got.seen.get(name), want.seen.get(name)):
            is_nan = name in got.seen and not bool(got.seen[name].isfinite().all())
            return Result("NaN" if is_nan else "other value", name)
    if got.error is not None:
        result = _of_error(program, got, got.error, want)
    elif want.error is not None:
        result = Result("no error", f"plain raises in step {want.error[0]}: {want.error[1]}")
    else:
        result = Result("equal")
    return result if result.is_failure else _left_behind(base, sources) or _restored(base, got, want) or result


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype is other.dtype and torch.equal(one, other)


def _of_error(program: Program, got: Run, error: tuple[int, Exception], want: Run) -> Result:
    step, raised = error
    text = f"{type(raised).__name__} in step {step}: {raised}".replace("\n", " ")
    if want.error is not None and want.error[0] == step:
        return Result("equal", "plain raises too")
    names = [name for name, _ in got.model.named_parameters(remove_duplicate=False)]
    if type(raised) not in (RuntimeError, ValueError) or not any(map(text.__contains__, names)):
        return Result("bad error", text)
    if step < 0 and program.budget:  # less than the weights that stay anyway
        return Result("refused", text)
    return Result("refused" if _REMEDY.search(text) and program.is_refusable else "needless error", text)


def _left_behind(base: StreamedWeights, sources: dict[StorageWeakRef, int]) -> Result | None:
    """Return a failure if memory stays that the report does not explain."""
    found = _unexplained(base, sources)
    if found:
        gc.collect()  # takes longer than most programs
        found = _unexplained(base, sources)
    return Result("memory", found) if found else None


def _unexplained(base: StreamedWeights, sources: dict[StorageWeakRef, int]) -> str:
    try:
        for _ in range(2):
            with base.stream("another"):
                report = base.report()
    except RuntimeError:
        return ""  # it stays refused
    explained = sum(report.resident.values())
    alive = sum(num_bytes for source, num_bytes in sources.items() if not source.expired())
    if report.device_bytes > explained - report.resident.get("small", 0):
        return f"{report.device_bytes} B on the device, {report.resident} explained"
    return f"{alive} B as before, {report.resident} explained" if alive > explained else ""


def _restored(base: StreamedWeights, got: Run, want: Run) -> Result | None:
    """Return a failure if weights have other values once they stream no more."""
    if want.error is None and got.error is None:
        base.remove()
        for (name, one), other in zip(got.model.named_parameters(), want.model.parameters(), strict=True):
            if not _same(one.detach(), other.detach()):
                return Result("other value", f"{name} after remove()")
    return None


def results(programs: Sequence[Program], limit_s: int = HANG_S) -> Iterator[tuple[Program, Result]]:
    """Check programs in a process, and in another one after a program has ended it."""
    while programs:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _serve(programs, writer, limit_s)
        os.close(writer)
        status = None
        try:
            with os.fdopen(reader, "rb") as pipe:
                while programs and (result := _read(pipe)) is not None:
                    yield programs[0], result
                    programs = programs[1:]
            status = os.waitpid(child, 0)[1]
        finally:
            if status is None:  # nobody wants the other results
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if programs:
            assert os.WIFSIGNALED(status), "the process ended without a result; its error is above"
            name = signal.Signals(os.WTERMSIG(status)).name
            yield programs[0], Result("hang" if name == "SIGALRM" else "signal", name)
            programs = programs[1:]


def _read(pipe: Any) -> Result | None:
    try:
        result: Result = pickle.load(pipe)
    except EOFError:
        return None
    return result


def shrunk(program: Program, result: Result, limit_s: int = HANG_S) -> Program:
    """Return the smallest program found that fails in the same way."""
    for one, found in results(list(smaller(program)), limit_s):
        if found.outcome == result.outcome:
            return shrunk(one, found, limit_s)
    return program


def _serve(programs: Sequence[Program], writer: int, limit_s: int) -> None:
    status = 1
    try:
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a program that hangs
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        gc.freeze()
        with tempfile.TemporaryDirectory() as disk:
            for program in programs:
                signal.alarm(limit_s)
                os.write(writer, pickle.dumps(check(program, disk)))
        status = 0
    finally:
        if status:
            import traceback

            traceback.print_exc()
        os._exit(status)
