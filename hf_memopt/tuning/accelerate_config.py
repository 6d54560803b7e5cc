"""The file that `accelerate launch` reads."""

from pathlib import Path

from accelerate.commands.config.config_args import ClusterConfig


def write_accelerate_config(path: Path, mixed_precision: str) -> Path:
    """For `accelerate launch --config_file`: one process on one GPU."""
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="NO",
        mixed_precision=mixed_precision,
        use_cpu=False,
        debug=False,
        num_processes=1,
    ).to_yaml_file(path)
    return path
