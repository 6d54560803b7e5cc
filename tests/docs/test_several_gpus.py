"""The page about several GPUs: its commands for the CPU run, and accelerate reads the others' files."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launched_files import launched
from patience import HANG_S

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several_gpus.md").read_text()
COMMANDS = [
    command
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for command in block.replace("\\\n", "").splitlines()
]
CONFIGS = sorted((ROOT / "recipes" / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("command", [each for each in COMMANDS if "torchrun" in each])
@pytest.mark.slow
def test_commands_for_the_cpu_run(command: str, tmp_path: Path) -> None:
    variable, _, *arguments = shlex.split(command)
    name, value = variable.split("=")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, name: value},
    )
    # A rank that has ended may abort in the destructors of torch's gloo: DDP and an all-reduce suffice.
    assert result.returncode == 0 or "terminate called without an active exception" in result.stderr, result.stderr
    if "train_sft" in command:
        assert (tmp_path / "outputs" / "two_processes" / "adapter_model.safetensors").is_file()
    else:
        assert re.search(r"^step 100  loss", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_files(config: Path) -> None:
    arguments, environment = launched(config)
    engines = arguments.multi_gpu, arguments.use_fsdp, arguments.use_deepspeed
    wanted = {"one_gpu": (1, ()), "ddp": (2, (0,)), "fsdp2": (2, (1,)), "zero3": (2, (2,))}
    wanted |= {"one_gpu_fsdp2_offload": (1, (1,)), "zero2_offload": (1, (2,)), "zero3_offload": (1, (2,))}
    wanted |= {"zero3_nvme": (1, (2,))}
    assert (arguments.num_processes, tuple(i for i, used in enumerate(engines) if used)) == wanted[config.stem]
    if config.stem == "fsdp2":
        assert (environment["FSDP_VERSION"], environment["FSDP_STATE_DICT_TYPE"]) == ("2", "SHARDED_STATE_DICT")
    if config.stem == "zero3":
        assert (arguments.zero_stage, arguments.mixed_precision) == (3, "bf16")


def test_the_page_names_files_and_tests_that_are_there() -> None:
    assert len(CONFIGS) == 8
    for name in re.findall(r"recipes/configs/accelerate/\S+\.yaml", PAGE):
        assert (ROOT / name).is_file(), name
    tests = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(tests) > 5
    assert [name for name in tests if not (ROOT / "tests" / "distributed" / f"{name}.py").is_file()] == []
