"""The flags of `lerobot-train`, as lerobot reads them."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from draccus.utils import DecodingError
from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig

from hf_memopt.command_line import argparse_raising
from hf_memopt.lerobot.several_datasets import with_one_dataset


def read_training_flags() -> TrainPipelineConfig:
    """Read and validate `sys.argv`; ValueError where lerobot would print its complaint and end the process.

    Several datasets are merged into one, which `sys.argv` names from then on.
    """
    sys.argv[1:] = with_one_dataset(sys.argv[1:])
    printed = io.StringIO()
    with complaints_as_errors(), redirect_stderr(printed):
        cfg = _parsed()
        try:
            cfg.validate()
        except FileExistsError as error:
            raise ValueError(
                f"output_dir={str(cfg.output_dir)!r} exists; name a new folder, or go on with the run in it: "
                "--resume=true --config_path=FOLDER/checkpoints/last/pretrained_model/train_config.json"
            ) from error
        # Paths are saved in each checkpoint, which may be used from another directory.
        cfg.output_dir = Path(cfg.output_dir).absolute()
        if cfg.dataset.root is not None:
            cfg.dataset.root = str(Path(cfg.dataset.root).expanduser().absolute())
    sys.stderr.write(printed.getvalue())
    return cfg


@contextmanager
def complaints_as_errors() -> Iterator[None]:
    """Raise ValueError in place of the complaints with which lerobot's parser ends the process."""
    try:
        with argparse_raising():
            yield
    except SystemExit as ending:
        complaint = ending.__context__
        if not isinstance(complaint, DecodingError):
            raise
        raise ValueError(_innermost(complaint)) from complaint


@parser.wrap()
def _parsed(cfg: TrainPipelineConfig) -> TrainPipelineConfig:
    return cfg


def _innermost(error: BaseException) -> str:
    """Return the fault in words; lerobot's own name the field where the cause does not."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(error) if cause is error else f"{error}: {cause}"
