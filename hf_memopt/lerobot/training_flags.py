"""The flags of `lerobot-train`, as lerobot reads them, and one dataset of several: `--dataset.repo_id=[a,b]`."""

import hashlib
import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import yaml
from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.datasets.aggregate import aggregate_datasets
from lerobot.utils.constants import HF_LEROBOT_HOME

from hf_memopt.disk.files_on_disk import new_folder, waiting_lock
from hf_memopt.lerobot.evaluate.measure import reading_dataset
from hf_memopt.lerobot.reflow.pair_source import dataset_sha256
from hf_memopt.planning.workloads.policy_run import complaints_as_errors

REPO_IDS, ROOTS = "dataset.repo_id", "dataset.root"
_FOLDER = "merged"  # in lerobot's own folder, which is also the namespace of the repository's name


def with_one_dataset(arguments: Sequence[str]) -> list[str]:
    """Return flags of `lerobot-train` in which several datasets are replaced by one, merged on the first use."""
    repo_ids = _listed(REPO_IDS, arguments)
    if repo_ids is None:
        return list(arguments)
    roots = _listed(ROOTS, arguments)
    folders = [None] * len(repo_ids) if roots is None else [Path(root).expanduser() for root in roots]
    if len(folders) != len(repo_ids) or len(repo_ids) < 2:
        raise ValueError(
            f"{REPO_IDS}={repo_ids} and {ROOTS}={roots}: pass two datasets or more, and as many folders or none"
        )
    root = merge(list(zip(repo_ids, folders, strict=True)))
    others = parser.filter_arg(ROOTS, parser.filter_arg(REPO_IDS, list(arguments)))
    return [*others, f"--{REPO_IDS}={_FOLDER}/{root.name}", f"--{ROOTS}={root}"]


def merge(named: Sequence[tuple[str, Path | None]]) -> Path:
    """Return the folder of a dataset that lerobot merges from others: their episodes in order, with joint statistics.

    It is named after their contents and made once. Costs one read of the tables, and on the first use a copy of all.
    """
    _check_alike([_read(LeRobotDatasetMetadata, name, root) for name, root in named])
    sources = [_read(LeRobotDataset, name, root) for name, root in named]
    digests = [dataset_sha256(source.root) for source in sources]
    key = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
    folder = Path(HF_LEROBOT_HOME) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with waiting_lock(folder / f".{key}.lock"):  # the other processes of a run wait, and find it
        if not (folder / key).exists():
            names, roots = [source.repo_id for source in sources], [Path(source.root) for source in sources]
            with new_folder(folder / key) as draft:
                draft.rmdir()  # which lerobot makes itself
                aggregate_datasets(names, f"{_FOLDER}/{key}", roots=roots, aggr_root=draft)
    return folder / key


def _read(kind: Any, name: str, root: Path | None) -> Any:
    with reading_dataset(name, root):
        return kind(name, root=root)


def _check_alike(metadata: Sequence[LeRobotDatasetMetadata]) -> None:
    first, *others = metadata
    for other in others:
        pairs = {"fps": (first.fps, other.fps), "robot_type": (first.robot_type, other.robot_type)}
        ours, theirs = _shapes(first.features), _shapes(other.features)
        pairs |= {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
        different = [f"{name} ({mine} and {its})" for name, (mine, its) in pairs.items() if mine != its]
        if different:
            raise ValueError(
                f"{REPO_IDS}: {first.repo_id!r} and {other.repo_id!r} differ in {', '.join(different)}; merge datasets "
                "of one robot, or make them alike by lerobot-edit-dataset"
            )


def _shapes(features: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: (feature["dtype"], *feature["shape"]) for name, feature in features.items()}


def _listed(name: str, arguments: Sequence[str]) -> list[str] | None:
    """Return the texts of a flag's list, or None for a flag that is missing or has one value."""
    text = parser.parse_arg(name, arguments)
    if text is None or not text.lstrip().startswith("["):
        return None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}={text} is no list; write [one,another]") from error
    return [str(value) for value in values]


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
