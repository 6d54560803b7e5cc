import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule

toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
lerobot_dataset = LateModule("lerobot.datasets.lerobot_dataset")
transformers = LateModule("transformers")


NUM_DEMONSTRATIONS = 200


@pytest.fixture(scope="module")
def demonstrations() -> list[Any]:
    return list(toy.demonstrations(NUM_DEMONSTRATIONS, seed=0))


def distances_to_obstacle(scene: Any, path: np.ndarray) -> np.ndarray:
    """Return the distances from ten points on each segment of `path`."""
    knots = np.linspace(0, len(path) - 1, 10 * (len(path) - 1) + 1)
    dense = np.stack([np.interp(knots, np.arange(len(path)), path[:, axis]) for axis in (0, 1)], axis=1)
    return np.linalg.norm(dense - scene.obstacle, axis=1)


def deviation(demonstration: Any) -> np.ndarray:
    """Return each position's signed distance from the line between start and goal, positive on the left."""
    scene = demonstration.scene
    x, y = (scene.goal - scene.start) / np.linalg.norm(scene.goal - scene.start)
    return (demonstration.positions - scene.start) @ np.array([-y, x])


def test_the_processor_knows_its_task_and_image_tokens(toy_vlm: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(toy_vlm)
    tokens = processor.tokenizer(f"{toy.TASK}\n")["input_ids"]
    assert processor.tokenizer.decode(tokens) == f"{toy.TASK}\n"
    assert max(tokens) < toy.TOY["text_config"]["vocab_size"]
    assert processor.tokenizer.fake_image_token_id != processor.tokenizer.global_image_token_id
    config = transformers.AutoConfig.from_pretrained(toy_vlm)
    assert config.image_token_id == processor.tokenizer.convert_tokens_to_ids("<image>")
    assert not list(toy_vlm.glob("*.safetensors"))


def test_the_same_vlm_is_written_twice(toy_vlm: Path, tmp_path: Path) -> None:
    again = toy.write_vlm(tmp_path / "vlm")
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in toy_vlm.iterdir()
    }


def test_the_real_shape_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(toy.write_vlm(tmp_path / "vlm", toy.REAL))
    with torch.device("meta"):
        model = transformers.SmolVLMForConditionalGeneration(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 507_482_304


def test_seeds_decide_and_more_episodes_only_add(demonstrations: list[Any]) -> None:
    again = list(toy.demonstrations(3, seed=0))
    for before, after in zip(demonstrations, again, strict=False):
        assert np.array_equal(before.positions, after.positions)
        assert before.side == after.side
    other = next(toy.demonstrations(1, seed=1))
    assert not np.array_equal(other.positions, again[0].positions)


def test_every_path_leads_around_the_obstacle_to_the_goal(demonstrations: list[Any]) -> None:
    for demonstration in demonstrations:
        scene, path = demonstration.scene, demonstration.positions
        assert path.shape == (7, 2)
        assert np.array_equal(path[0], scene.start)
        assert np.linalg.norm(path[-1] - scene.goal) < 0.1
        assert distances_to_obstacle(scene, path).min() > toy.OBSTACLE_RADIUS


def test_both_sides_are_taken_and_their_average_is_blocked(demonstrations: list[Any]) -> None:
    sides = np.array([demonstration.side for demonstration in demonstrations])
    assert 0.4 < (sides == 1).mean() < 0.6
    largest = np.array([values[np.abs(values).argmax()] for values in map(deviation, demonstrations)])
    assert np.array_equal(np.sign(largest), sides)
    assert np.abs(largest).min() > 0.4
    for demonstration in demonstrations:
        scene = demonstration.scene
        straight = np.linspace(scene.start, scene.goal, 9)  # the straight line, between the paths of both sides
        assert distances_to_obstacle(scene, straight).min() < toy.OBSTACLE_RADIUS / 2


def test_the_first_observation_does_not_tell_the_side_and_the_first_action_does(demonstrations: list[Any]) -> None:
    sides = np.array([demonstration.side for demonstration in demonstrations])
    starts = np.stack([[*demonstration.scene.start, *demonstration.scene.goal] for demonstration in demonstrations])
    assert np.abs(starts[sides == 1].mean(0) - starts[sides == -1].mean(0)).max() < 0.05
    aside = np.stack([deviation(demonstration) for demonstration in demonstrations])
    assert np.abs(aside[:, 0]).max() < 1e-6
    assert np.array_equal(np.sign(aside[:, 1]), sides)
    assert (np.abs(aside).argmax(axis=1) == 1).all()  # the sides differ most in the action that decides


def test_the_image_shows_where_things_are(demonstrations: list[Any]) -> None:
    scene, agent = demonstrations[0].scene, demonstrations[0].positions[2]
    image = toy.draw_image(scene, agent).astype(float)
    assert image.shape == (toy.IMAGE_SIZE, toy.IMAGE_SIZE, 3)
    ticks = (np.arange(toy.IMAGE_SIZE) + 0.5) / toy.IMAGE_SIZE * 2 - 1
    for channel, center in ((0, agent), (1, scene.goal), (2, scene.obstacle)):
        colorful = image[..., channel] - image.mean(axis=-1) > 100  # no other object has much of this color
        y, x = np.nonzero(colorful)
        found = np.array([ticks[x].mean(), -ticks[y].mean()])
        assert np.linalg.norm(found - center) < 2 / toy.IMAGE_SIZE


def test_the_dataset_holds_the_demonstrations(toy_dataset: Path) -> None:
    dataset = lerobot_dataset.LeRobotDataset(toy.REPO_ID, root=toy_dataset)
    assert (dataset.num_episodes, dataset.num_frames) == (4, 24)
    frame = next(iter(toy.demonstrations(1, seed=0)))
    for index in (0, 5):
        item = dataset[index]
        assert torch.equal(item["observation.state"], torch.from_numpy(frame.positions[index]))
        assert torch.equal(item["action"], torch.from_numpy(frame.positions[index + 1]))
        image = torch.from_numpy(toy.draw_image(frame.scene, frame.positions[index])).permute(2, 0, 1) / 255
        assert torch.equal(item[toy.CAMERA], image)
        assert item["task"] == toy.TASK
    features = json.loads((toy_dataset / "meta" / "info.json").read_text())["features"]
    assert features[toy.CAMERA]["dtype"] == "image"


def test_an_existing_dataset_is_not_overwritten(toy_dataset: Path) -> None:
    with pytest.raises(ValueError, match=r"exists; name a new folder or remove"):
        toy.write_dataset(toy_dataset, num_episodes=1, seed=0)


def test_flags_name_every_setting_of_the_toy(tmp_path: Path) -> None:
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in toy.policy_flags(tmp_path))
    assert flags["policy.type"] == "smolvla"
    assert flags["policy.vlm_model_name"] == str(tmp_path)
    for name, value in toy.POLICY_SETTINGS.items():
        assert json.loads(flags[f"policy.{name}"]) == (list(value) if isinstance(value, tuple) else value)


def test_flags_hold_in_any_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"--policy.vlm_model_name={tmp_path / 'vlm'}" in toy.policy_flags(Path("vlm"))
    assert f"--dataset.root={tmp_path / 'data'}" in toy.dataset_flags(Path("data"))
