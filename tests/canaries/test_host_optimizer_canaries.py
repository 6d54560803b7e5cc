"""Canaries of optimizers on the host: what torchao's ignores, and what `accelerate launch` does not pass on."""

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reliance import relied_on_by

CONFIG = "hf_memopt/jobs/accelerate_config.py"


def source(package: str, path: str) -> str:
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / path).read_text(encoding="utf-8")


class OnTheCpu:
    """What `CPUOffloadOptimizer` asks a device for; copies on a CPU are done at once."""

    def __init__(self, *arguments: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> "OnTheCpu":
        return self

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A weight, and torchao's optimizer that updates it by SGD with a learning rate of 1."""
    from torchao.optim import CPUOffloadOptimizer, cpu_offload

    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cuda"])
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, OnTheCpu)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, pin_memory=False, **options: empty_like(like, **options))
    weight = torch.zeros(8, requires_grad=True)
    return weight, CPUOffloadOptimizer([weight], torch.optim.SGD, minimal_size=0, lr=1.0)


def test_torchaos_optimizer_ignores_clipping(offloaded: tuple[torch.Tensor, torch.optim.Optimizer]) -> None:
    with relied_on_by(CONFIG):
        weight, optimizer = offloaded
        (weight * 10).sum().backward()
        torch.nn.utils.clip_grad_norm_([weight], 0.1)
        optimizer.step()
        assert weight.tolist() == [-10.0] * 8


def test_torchaos_optimizer_ignores_learning_rates_of_small_weights_once_its_state_is_loaded() -> None:
    """Watch the reason for `minimal_size=0`: Accelerate loads the state of each optimizer that it prepares."""
    with relied_on_by("recipes/sft/trainer.py"):
        from torchao.optim import CPUOffloadOptimizer

        groups = inspect.getsource(CPUOffloadOptimizer.param_groups.fget)
        assert "start=self.d_param_groups" in groups
        assert "d_param_groups" not in inspect.getsource(CPUOffloadOptimizer.load_state_dict)
        assert "minimal_size" in inspect.signature(CPUOffloadOptimizer).parameters
        assert "self.optimizer.load_state_dict(state_dict)" in source("accelerate", "optimizer.py")


def test_accelerate_does_not_pass_on_the_folder_of_a_disk() -> None:
    """Watch the reason for a file of DeepSpeed's own."""
    with relied_on_by(CONFIG):
        assert '"--offload_optimizer_nvme_path"' in source("accelerate", "commands/launch.py")
        assert "nvme" not in source("accelerate", "utils/launch.py").lower()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeeds_files_need_libaio() -> None:
    """Watch the reason for naming `libaio-dev` where a plan puts the optimizer on a disk."""
    with relied_on_by("docs/optimizer_offload.md"):
        builder = source("deepspeed", "ops/op_builder/async_io.py")
        assert "self.has_function('io_submit', ('aio', ))" in builder
        assert 'dpkg=["-l", "libaio-dev", "apt"]' in builder
