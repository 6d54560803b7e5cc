import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from recipe_flags import CAUSAL_LM, FLUXFLOW, LGT, NEURAL_OPERATOR
from torch.nn.modules.module import register_module_forward_pre_hook

pytestmark = pytest.mark.e2e

auto_plan = LateModule("hf_memopt.recipes.common.auto_plan")
causal_lm_options = LateModule("hf_memopt.recipes.causal_lm.options")
lgt_config = LateModule("hf_memopt.recipes.lgt.options")
train_causal_lm = LateModule("hf_memopt.recipes.train_causal_lm")
train_fluxflow = LateModule("hf_memopt.recipes.train_fluxflow")
train_lgt = LateModule("hf_memopt.recipes.train_lgt")
train_neural_operator = LateModule("hf_memopt.recipes.train_neural_operator")

# The recipe, its flags, the flags of half the micro-batch, and the flag of its folder.
RECIPES: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...], str]] = {
    "causal_lm": (
        train_causal_lm,
        (*CAUSAL_LM, "--max_steps=3", "--offload=off"),
        ("--per_device_batch_size=4", "--gradient_accumulation_steps=2"),
        "output_dir",
    ),
    "fluxflow": (train_fluxflow, (*FLUXFLOW, "--max_steps=2"), ("--micro_batch_size=2",), "output_dir"),
    "lgt": (
        train_lgt,
        (*LGT, "--gradient_cache", "--num_epochs=1", "--accumulation_steps=1"),
        ("--batch_size=2", "--accumulation_steps=2"),
        "save_dir",
    ),
    "neural_operator": (
        train_neural_operator,
        (*NEURAL_OPERATOR, "--epochs=1", "--test_resolutions", "16", "--offload=off"),
        ("--micro_batch_size=4",),
        "output_dir",
    ),
}
# The largest number of rows of a training step that fits; an evaluation has more rows.
LIMITS = {"causal_lm": 4, "fluxflow": 2, "lgt": 2, "neural_operator": 4}


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """A function that makes training forward passes of more than a number of rows run out of memory."""
    handles = []

    def set_limit(num_rows: int) -> None:
        def refuse(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = [len(each) for each in inputs if type(each) is torch.Tensor and each.dim() > 1]  # no weights
            if torch.is_grad_enabled() and module.training and max(rows, default=0) > num_rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        handles.append(register_module_forward_pre_hook(refuse))

    yield set_limit
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sweep(share=0.4)
def test_half_the_micro_batch_is_what_the_user_would_have_asked_for(
    name: str, tmp_path: Path, limit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, flags, halved, folder = RECIPES[name]
    asked = recipe.main([*flags, *halved, f"--{folder}={tmp_path / 'asked'}"])
    limit(LIMITS[name])
    with caplog.at_level(logging.WARNING):
        found = recipe.main([*flags, "--auto_micro_batch", f"--{folder}={tmp_path / 'found'}"])
    size = LIMITS[name]
    assert f"Out of memory with micro-batches of {2 * size}; beginning again with {size}" in caplog.text
    assert figures(found) == figures(asked) != []
    assert (tmp_path / "found" / "out_of_memory_rank0.txt").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_the_error_names_the_flags_that_help(name: str, tmp_path: Path, limit: Callable[[int], None]) -> None:
    recipe, flags, _, folder = RECIPES[name]
    limit(LIMITS[name])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        recipe.main([*flags, f"--{folder}={tmp_path}"])
    (note,) = caught.value.__notes__
    for flag in ("--auto_micro_batch", "--offload auto", "checkpoint"):
        assert flag in note.partition("What each remedy would have saved")[2]
    assert (tmp_path / "out_of_memory_rank0.txt").read_text() in note


def figures(results: dict[str, Any]) -> list[dict[str, float]]:
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in results["history"]]


def test_a_run_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run out of memory in the fifth update, as at longer samples."""
    updates = []
    update = train_causal_lm.update

    def counted(run: Any, batches: Any) -> Any:
        updates.append(run.options.training.per_device_batch_size)
        if len(updates) == 5:
            limit(4)
        return update(run, batches)

    monkeypatch.setattr("hf_memopt.recipes.train_causal_lm.update", counted)
    flags = ["--max_steps=6", "--checkpointing_steps=2", "--offload=off", "--auto_micro_batch", "--log_every=1"]
    results = train_causal_lm.main([*CAUSAL_LM, *flags, f"--output_dir={tmp_path}"])
    assert updates == [8, 8, 8, 8, 8, 4, 4]
    assert [entry["update"] for entry in results["history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_halved_is_refused(tmp_path: Path) -> None:
    flags = ["--auto_micro_batch", f"--output_dir={tmp_path}"]
    with pytest.raises(ValueError, match=r"have another loss then; add --training\.gradient_cache"):
        lgt_config.parse("", [*LGT, "--auto_micro_batch"])
    options = causal_lm_options.parse("", [*CAUSAL_LM, *flags])
    several: Any = SimpleNamespace(num_processes=2)
    with pytest.raises(ValueError, match="auto_micro_batch=True is for one process, and there are 2; use --plan auto"):
        auto_plan.train_within_memory(options, several, None, None, None)


def test_the_smallest_micro_batch_is_not_halved(tmp_path: Path, limit: Callable[[int], None]) -> None:
    limit(0)
    with pytest.raises(torch.OutOfMemoryError):
        train_causal_lm.main([*CAUSAL_LM, "--offload=off", "--auto_micro_batch", f"--output_dir={tmp_path}"])
