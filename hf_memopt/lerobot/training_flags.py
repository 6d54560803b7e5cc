"""The flags of `lerobot-train`, as lerobot reads them."""

import io
import sys
from contextlib import redirect_stderr
from pathlib import Path

from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig

from hf_memopt.lerobot.several_datasets import with_one_dataset
from hf_memopt.planning.workloads.policy_run import complaints_as_errors


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


@parser.wrap()
def _parsed(cfg: TrainPipelineConfig) -> TrainPipelineConfig:
    return cfg
