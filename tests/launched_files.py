"""What `accelerate launch` makes of a file: its own arguments, and the environment of its processes."""

import os
from pathlib import Path
from typing import Any

import yaml
from late_imports import LateModule

launch = LateModule("accelerate.commands.launch")
launch_utils = LateModule("accelerate.utils.launch")


def launched(path: Path) -> tuple[Any, dict[str, str]]:
    """Return the arguments of `accelerate launch` with a file, and its processes' environment."""
    words = ["--config_file", str(path), "--main_process_port", "0", "script.py"]  # any port that is free
    arguments = launch.launch_command_parser().parse_args(words)
    arguments, _, _ = launch._validate_launch_command(arguments)
    if not arguments.use_deepspeed:
        return arguments, launch_utils.prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = _said_to_deepspeed(path)
    _, environment = launch_utils.prepare_deepspeed_cmd_env(arguments)
    return arguments, environment


def _said_to_deepspeed(path: Path) -> str:
    """Return fields of the file, as `accelerate launch` does, which are refused beside a file of DeepSpeed's own."""
    said = yaml.safe_load(path.read_text())
    return ",".join([*said["deepspeed_config"], *(["mixed_precision"] if "mixed_precision" in said else [])])


def added_environment(path: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for a file."""
    _, environment = launched(path)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}
