"""Canaries of couplings and their evaluation in torch, datasets and lerobot."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import INTEGRATION, relied_on_by

datasets = LateModule("datasets")
arrow_writer = LateModule("datasets.arrow_writer")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
lerobot_datasets = LateModule("lerobot.datasets")
datasets_factory = LateModule("lerobot.datasets.factory")
utils = LateModule("lerobot.envs.utils")
factory = LateModule("lerobot.policies.factory")
lerobot_eval = LateModule("lerobot.scripts.lerobot_eval")
lerobot_train = LateModule("lerobot.scripts.lerobot_train")
pyarrow = LateModule("pyarrow")


SPEC = "hf_memopt/lerobot/couplings/cache.py"
STORE = "hf_memopt/lerobot/couplings/store.py"


def test_the_cpu_generator_takes_32_bits_of_a_seed_and_its_stream_is_fixed() -> None:
    with relied_on_by(SPEC):
        first, second = (torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32))
        assert torch.equal(torch.randn(3, generator=first), torch.randn(3, generator=second))
        # With other numbers, the noise would no longer fit the targets in older folders.
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(drawn, torch.tensor([1.5409961, -0.2934289, -2.1787894]), rtol=0, atol=1e-6)


def test_a_dataset_over_a_mapped_file_copies_and_hashes_nothing_and_outlives_the_files_name(tmp_path: Path) -> None:
    with relied_on_by(STORE):
        file, features = tmp_path / "shard.arrow", datasets.Features({"x": datasets.Value("int64")})
        for values in ([2, 3], [0, 1]):
            with arrow_writer.ArrowWriter(features=features, path=str(tmp_path / "draft"), fingerprint="given") as out:
                out.write_batch({"x": values * 100_000})
                out.finalize()
            (tmp_path / "draft").rename(tmp_path / str(values[0]))
        (tmp_path / "0").rename(file)
        before = pyarrow.total_allocated_bytes()
        with pyarrow.memory_map(str(file)) as mapped:
            content = mapped.read_buffer()
        part = datasets.Dataset.from_buffer(content)
        assert part._fingerprint == "given"  # else all data is hashed once more
        rows = datasets.concatenate_datasets([part, part])
        assert pyarrow.total_allocated_bytes() - before < 100_000
        (tmp_path / "2").replace(file)
        assert rows[:2]["x"] == [0, 1]


def test_a_policy_in_training_is_told_its_dataset(
    toy_student: Path, toy_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with relied_on_by(f"{INTEGRATION}/modeling_smolvla_reflow.py"):
        seen: dict[str, Any] = {}

        class Policy:
            @classmethod
            def from_pretrained(cls, **kwargs: Any) -> torch.nn.Module:
                seen.update(kwargs)
                return torch.nn.Linear(1, 1)

        monkeypatch.setattr("lerobot.policies.factory.get_policy_class", lambda _: Policy)
        config = policy_files.load_config(toy_student)
        config.device, config.pretrained_path = "cpu", str(toy_student)
        meta = lerobot_datasets.LeRobotDatasetMetadata(toy.REPO_ID, root=toy_dataset)
        factory.make_policy(cfg=config, ds_meta=meta)
        assert seen["dataset_meta"].root == toy_dataset
        assert seen["dataset_stats"] is meta.stats


def test_lerobots_loop_turns_bytes_into_floats_before_it_preprocesses() -> None:
    with relied_on_by(f"{INTEGRATION}/precompute_pairs.py"):
        # From 0.6.2 on, lerobot has a function for this.
        source = inspect.getsource(getattr(lerobot_train, "_preprocess_dataset_batch", lerobot_train.train))
        convert = source.index(".to(dtype=torch.float32) / 255.0")
        assert convert < source.index("preprocessor(batch)", convert)
        assert "return_uint8=True" in inspect.getsource(datasets_factory.make_dataset)


def test_rollouts_freeze_finished_environments_and_report_success() -> None:
    with relied_on_by(f"{INTEGRATION}/evaluate/rollouts.py"):
        assert list(inspect.signature(lerobot_eval.eval_policy).parameters)[:7] == [
            "env",
            "policy",
            "env_preprocessor",
            "env_postprocessor",
            "preprocessor",
            "postprocessor",
            "n_episodes",
        ]
        assert {"step", "reset"} <= vars(utils.FreezeAfterEpisodeEnd).keys()
        source = inspect.getsource(lerobot_eval.eval_policy)
        assert all(f'"{name}"' in source for name in ("aggregated", "pc_success", "avg_sum_reward"))
