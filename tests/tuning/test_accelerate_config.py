"""The file that `accelerate launch` reads."""

from pathlib import Path

from hf_memopt.tuning.accelerate_config import write_accelerate_config


def test_accelerate_reads_one_process_and_its_precision(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = write_accelerate_config(tmp_path / "accelerate.yaml", "bf16")
    config = load_config_from_file(str(path))
    assert (config.mixed_precision, config.num_processes, config.use_cpu) == ("bf16", 1, False)
