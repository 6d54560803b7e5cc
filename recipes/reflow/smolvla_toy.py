"""A SmolVLA small enough to train on a laptop CPU, and a task whose answer is genuinely ambiguous.

The agent of the toy task starts on the left, the goal lies on the right, and an obstacle stands between them. The
demonstrator passes it on the left or on the right by the toss of a coin, so the distribution of the first action chunk
given the observation has two modes. One Euler step of a flow trained on that lands between both: in the obstacle.

The demonstrator first leaps aside, and then turns back towards the goal. SmolVLA's expert lets an action see only those
before it in the chunk, so its first action has to decide the side, and does so best if the sides differ most there.

`make demo` trains on it. Nothing is downloaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets.utils import disable_progress_bars, enable_progress_bars
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import (
    GPT2Tokenizer,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

__all__ = ["dataset_flags", "policy_flags", "write_dataset", "write_vlm"]

FloatArray = NDArray[np.float32]

REPO_ID = "local/reach_past_obstacle"
CAMERA = "observation.images.top"
TASK = "reach the goal and avoid the obstacle"
IMAGE_SIZE = 32
FPS = 10
PATH_STEPS = 6  # of one reach: frames of an episode, and actions of a chunk

# Everything of a SmolVLAConfig that belongs to the toy; the rest keeps lerobot's defaults.
POLICY_SETTINGS: dict[str, int | bool | tuple[int, int]] = {
    "load_vlm_weights": False,
    "num_vlm_layers": 4,
    "chunk_size": PATH_STEPS,
    "n_action_steps": PATH_STEPS,
    "max_state_dim": 4,
    "max_action_dim": 4,
    "resize_imgs_with_padding": (IMAGE_SIZE, IMAGE_SIZE),
    "push_to_hub": False,
}

OBSTACLE_RADIUS = 0.12
_OBSTACLE_AT = 0.4  # of the way from the start to the goal
_LEAP = 0.85
_HAND_NOISE = 0.01
_BACKGROUND = (128, 128, 128)
_COLORS = {"obstacle": (0, 0, 255), "goal": (0, 255, 0), "agent": (255, 0, 0)}
_RADII = {"obstacle": OBSTACLE_RADIUS, "goal": 0.2, "agent": 0.2}


# The parts of a SmolVLMConfig: Llama's text model, SigLIP's vision model, and patches per token along a side.
VLMShape = dict[str, Any]

_TOY_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 320}
_TOY_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TOY: VLMShape = {
    "text_config": {**_TOY_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "vision_config": {**_TOY_VISION, "image_size": IMAGE_SIZE, "patch_size": 4},
    "scale_factor": 2,
    "initializer_range": 0.125,
}

# SmolVLM2-500M-Video-Instruct, as its published config.json describes it.
_REAL_TEXT = {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "vocab_size": 49280}
_REAL_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
REAL: VLMShape = {
    "text_config": {**_REAL_TEXT, "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64},
    "vision_config": {**_REAL_VISION, "image_size": 512, "patch_size": 16},
    "scale_factor": 4,
    "initializer_range": 0.02,
}


def write_vlm(output: Path, shape: VLMShape = TOY) -> Path:
    """Write a SmolVLM2 folder that lerobot accepts as `vlm_model_name`: config, processor and tokenizer, no weights.

    The tokenizer knows a few hundred tokens for any shape; only the embedding has all of `vocab_size` rows. Takes about
    a second. Returns `output`, which is created if needed.
    """
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    _write_processor(output, tokenizer, shape)
    spread = {"initializer_range": shape["initializer_range"]}
    llama = {"model_type": "llama", "rope_theta": 100_000, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    SmolVLMConfig(
        vision_config={**shape["vision_config"], **spread},
        text_config={**llama, **shape["text_config"], **spread, "pad_token_id": tokenizer.pad_token_id},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=shape["scale_factor"],
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    ).save_pretrained(output)
    return output


def _train_tokenizer() -> PreTrainedTokenizerFast:
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    size, special = TOY["text_config"]["vocab_size"], ["<|im_start|>", "<|im_end|>", *named.values()]
    trained = GPT2Tokenizer().train_new_from_iterator(
        [f"{TASK}\n"] * 4, size, new_special_tokens=special, show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=named,
    )


def _write_processor(output: Path, tokenizer: PreTrainedTokenizerFast, shape: VLMShape) -> None:
    image_size, patch_size = shape["vision_config"]["image_size"], shape["vision_config"]["patch_size"]
    edge = {"longest_edge": image_size}
    image_seq_len = (image_size // patch_size // shape["scale_factor"]) ** 2
    SmolVLMProcessor(
        SmolVLMImageProcessor(size=edge, max_image_size=edge),
        tokenizer,
        SmolVLMVideoProcessor(
            size=edge, max_image_size=edge, video_sampling={"fps": 1, "max_frames": 8, "video_size": edge}
        ),
        image_seq_len=image_seq_len,
    ).save_pretrained(output)


@dataclass(frozen=True)
class Scene:
    """The places of things in the square from -1 to 1. Each point is `(x, y)`."""

    start: FloatArray
    goal: FloatArray
    obstacle: FloatArray

    @property
    def left(self) -> FloatArray:
        """The unit vector to the left of the way from the start to the goal."""
        x, y = self.goal - self.start
        return np.array([-y, x]) / np.hypot(x, y)


@dataclass(frozen=True)
class Demonstration:
    """One reach: the agent passes the obstacle on its left (`side` +1) or on its right (-1)."""

    scene: Scene
    side: int
    positions: FloatArray  # (7, 2), from the start to the goal; the action of frame i is position i + 1


def demonstrations(num_episodes: int, seed: int) -> Iterator[Demonstration]:
    """Yield the demonstrator's reaches. The same seed yields the same ones, and more episodes only add to them."""
    rng = np.random.default_rng(seed)
    for _ in range(num_episodes):
        scene = _draw_scene(rng)
        side = int(rng.choice((-1, 1)))
        positions = _ideal_path(scene, side)
        positions[1:] += rng.normal(scale=_HAND_NOISE, size=positions[1:].shape)
        yield Demonstration(scene, side, positions.astype(np.float32))


def _draw_scene(rng: np.random.Generator) -> Scene:
    start = np.array([-0.8, rng.uniform(-0.25, 0.25)])
    goal = np.array([0.8, rng.uniform(-0.25, 0.25)])
    obstacle = start + _OBSTACLE_AT * (goal - start)
    return Scene(*(point.astype(np.float32) for point in (start, goal, obstacle)))


def _ideal_path(scene: Scene, side: int) -> FloatArray:
    """Leap aside at once, so that nothing in the first observation tells yet which side it will be, and turn back."""
    progress = np.linspace(0, 1, PATH_STEPS + 1)[:, None]
    aside = _LEAP * (1 - progress) ** 1.5
    aside[0] = 0
    return scene.start + progress * (scene.goal - scene.start) + side * aside * scene.left


def draw_image(scene: Scene, agent: FloatArray) -> NDArray[np.uint8]:
    """Draw the camera's picture: obstacle, goal and agent as discs, `(32, 32, 3)`."""
    ticks = (np.arange(IMAGE_SIZE) + 0.5) / IMAGE_SIZE * 2 - 1
    x, y = np.meshgrid(ticks, -ticks)
    image = np.broadcast_to(np.array(_BACKGROUND, dtype=np.float64), (IMAGE_SIZE, IMAGE_SIZE, 3))
    for name, center in (("obstacle", scene.obstacle), ("goal", scene.goal), ("agent", agent)):
        distance = np.hypot(x - center[0], y - center[1])
        # One pixel of soft edge, so that a move of less than a pixel still shows.
        cover = np.clip((_RADII[name] - distance) * IMAGE_SIZE / 2 + 0.5, 0, 1)[..., None]
        image = image * (1 - cover) + cover * np.array(_COLORS[name])
    return image.round().astype(np.uint8)


def write_dataset(output: Path, num_episodes: int, seed: int) -> Path:
    """Write the demonstrations as a LeRobotDataset with images, 6 frames per episode.

    Returns `output`, the dataset's root, which must not exist before (ValueError); its repo id is `REPO_ID`.
    """
    if output.exists():
        raise ValueError(f"output={str(output)!r} exists; name a new folder or remove this one")
    names = ["x", "y"]
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": names},
        "action": {"dtype": "float32", "shape": (2,), "names": names},
        CAMERA: {"dtype": "image", "shape": (IMAGE_SIZE, IMAGE_SIZE, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create(REPO_ID, fps=FPS, features=features, root=output, use_videos=False)
    disable_progress_bars()  # those that `datasets` shows for the few rows of every single episode
    for episode in tqdm(demonstrations(num_episodes, seed), total=num_episodes, desc="episodes", unit="ep"):
        for position, target in zip(episode.positions[:-1], episode.positions[1:], strict=True):
            image = draw_image(episode.scene, position)
            dataset.add_frame({"observation.state": position, "action": target, CAMERA: image, "task": TASK})
        dataset.save_episode()
    dataset.finalize()
    enable_progress_bars()
    return output


def policy_flags(vlm: Path) -> list[str]:
    """Return the toy's `lerobot-train` flags for a policy from scratch, which then works in any working directory."""
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in POLICY_SETTINGS.items()}
    return [
        "--policy.type=smolvla",
        f"--policy.vlm_model_name={vlm.resolve()}",
        *(f"--policy.{key}={str(value).lower()}" for key, value in settings.items()),
    ]


def dataset_flags(dataset: Path, repo_id: str = REPO_ID) -> list[str]:
    """Return the `lerobot-train` flags for local data, which then work in any working directory."""
    return [f"--dataset.repo_id={repo_id}", f"--dataset.root={dataset.resolve()}", "--env_eval_freq=0"]
