"""Configurations of toy policies of lerobot's own types, without weights."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.policies import make_policy_config
from pi0_toys import toy_sizes

from hf_memopt.recipes.reflow.smolvla_toy import CAMERA, IMAGE_SIZE, PATH_STEPS, POLICY_SETTINGS, REPO_ID

_CHUNK = {"chunk_size": PATH_STEPS, "n_action_steps": PATH_STEPS}
_PI: dict[str, Any] = {**_CHUNK, "image_resolution": (IMAGE_SIZE, IMAGE_SIZE), "max_state_dim": 4, "max_action_dim": 4}
_SETTINGS: dict[str, dict[str, Any]] = {
    "smolvla": POLICY_SETTINGS,
    "pi0": _PI,
    "pi05": _PI,
    "act": {**_CHUNK, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "n_vae_encoder_layers": 2},
    "diffusion": {
        "down_dims": (32, 64),
        "use_group_norm": True,
        "horizon": 8,
        "n_action_steps": 4,
        "n_groups": 4,
        "drop_n_last_frames": 3,
    },
}
KINDS = tuple(_SETTINGS)


def policy_config(kind: str, vlm: Path, **changes: Any) -> Any:
    names = {"vlm_model_name": str(vlm)} if kind == "smolvla" else {}
    features = {
        "input_features": {
            "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
            CAMERA: PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIZE, IMAGE_SIZE)),
        },
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))},
    }
    fields = {**_SETTINGS[kind], **names, **features, "device": "cpu", "push_to_hub": False, **changes}
    return make_policy_config(kind, **fields)


def write_policy(folder: Path, kind: str, vlm: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    policy_config(kind, vlm, **changes).save_pretrained(folder)
    return folder


def write_run(folder: Path, kind: str, vlm: Path, dataset: Path, **changes: Any) -> Path:
    """Write the `train_config.json` of a run of two steps from scratch, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    run = TrainPipelineConfig(
        dataset=DatasetConfig(repo_id=REPO_ID, root=str(dataset)),
        policy=policy_config(kind, vlm, **changes),
        output_dir=folder / "run",
        batch_size=2,
        steps=2,
        num_workers=0,
        log_freq=1,
        env_eval_freq=0,
    )
    run.save_pretrained(folder)
    return folder / "train_config.json"


def toy_size(kind: str, vlm: Path) -> AbstractContextManager[Any]:
    """Let lerobot build this kind in toy size, also where its configuration has no fields for that."""
    return toy_sizes(vlm, kind) if kind in ("pi0", "pi05") else nullcontext()
