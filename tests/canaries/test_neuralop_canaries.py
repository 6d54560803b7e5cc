"""Canaries of the Darcy recipe in neuralop."""

import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by
from torch import Tensor, nn
from torch.utils.data import DataLoader

neural_operator_model = LateModule("hf_memopt.recipes.neural_operator.step")
neural_operator_options = LateModule("hf_memopt.recipes.neural_operator.options")
neuralop = LateModule("neuralop")
pt_dataset = LateModule("neuralop.data.datasets.pt_dataset")
data_processors = LateModule("neuralop.data.transforms.data_processors")
fno_block = LateModule("neuralop.layers.fno_block")
spectral_convolution = LateModule("neuralop.layers.spectral_convolution")
models = LateModule("neuralop.models")
training = LateModule("neuralop.training")


MODEL = "recipes/neural_operator/step.py"
DATA = "recipes/neural_operator/data.py"
LOOP = "recipes/train_neural_operator.py"
EVALUATION = "recipes/neural_operator/step.py"
TRAINER = "recipes/neural_operator/trainer.py"
DARCY = "recipes/neural_operator/darcy.py"


def small(kind: str = "fno") -> nn.Module:
    return neural_operator_model.make_model(
        neural_operator_options.ModelOptions(model=kind, modes=4, hidden_channels=4)
    )


@pytest.mark.parametrize(("kind", "num_blocks"), [("fno", 1), ("tfno", 1), ("uno", 4)])
def test_layers_are_called_by_the_names_that_are_checkpointed(kind: str, num_blocks: int) -> None:
    with relied_on_by("recipes/neural_operator/options.py"):
        called: list[nn.Module] = []
        model = small(kind)
        blocks = [module for module in model.modules() if isinstance(module, fno_block.FNOBlocks)]
        assert len(blocks) == num_blocks
        assert {type(block).__name__ for block in blocks} == {"FNOBlocks"}
        for module in (*blocks, model.lifting, model.projection):
            module.register_forward_hook(lambda module, inputs, output: called.append(module))
        model(torch.ones(1, 1, 16, 16))
        assert [called.count(model.lifting), called.count(model.projection)] == [1, 1]
        assert sum(called.count(block) for block in blocks) == 4


def test_spectral_convolutions_are_called_as_modules_with_what_is_transformed_first() -> None:
    with relied_on_by(MODEL):
        for kind in ("fno", "tfno", "uno"):
            assert sum(isinstance(module, spectral_convolution.SpectralConv) for module in small(kind).modules()) == 4
        assert (
            next(iter(inspect.signature(spectral_convolution.SpectralConv.forward).parameters.values())).name == "self"
        )
        assert list(inspect.signature(spectral_convolution.SpectralConv.forward).parameters)[1] == "x"


def test_a_uno_still_prints_and_cannot_save_itself() -> None:
    with relied_on_by(MODEL):
        assert "print(" in inspect.getsource(models.UNO.__init__)
        assert not hasattr(models.UNO, "save_checkpoint")
        assert hasattr(models.FNO, "save_checkpoint")
        assert issubclass(models.TFNO, models.FNO)


def test_state_dicts_hold_the_arguments_and_load_without_them() -> None:
    with relied_on_by(LOOP):
        state = small().state_dict()
        assert [name for name, value in state.items() if not isinstance(value, Tensor)] == ["_metadata"]
        del state["_metadata"]
        small().load_state_dict(state)


def test_losses_are_relative_and_sums_over_samples() -> None:
    with relied_on_by(EVALUATION):
        generator = torch.Generator().manual_seed(0)
        ours, truth = (torch.randn(3, 1, 8, 8, generator=generator) for _ in range(2))
        for loss in (neuralop.LpLoss(d=2, p=2), neuralop.H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)):
            parts = [loss(a, b) for a, b in zip(ours.split(1), truth.split(1), strict=True)]
            torch.testing.assert_close(loss(ours, truth), torch.stack(parts).sum())
            torch.testing.assert_close(loss(7 * ours, 7 * truth), loss(ours, truth))
        errors = (ours - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        torch.testing.assert_close(neuralop.LpLoss(d=2, p=2)(ours, truth), errors.sum())


def test_the_processor_normalises_solutions_in_training_and_predictions_in_evaluation() -> None:
    with relied_on_by(LOOP):
        assert "self.training" in inspect.getsource(data_processors.DefaultDataProcessor.preprocess)
        assert "not self.training" in inspect.getsource(data_processors.DefaultDataProcessor.postprocess)


@pytest.fixture
def files(tmp_path: Path) -> Any:
    for name in ("train_5", "test_5", "test_7"):
        nodes = int(name[-1])
        x = torch.randint(0, 2, (4, nodes, nodes), generator=torch.Generator().manual_seed(0)).bool()
        torch.save({"x": x, "y": x.float() + 1}, tmp_path / f"darcy_{name}.pt")
    return pt_dataset.PTDataset(tmp_path, "darcy", 3, [2, 2], 1, [1, 1], 5, [5, 7])


def test_files_are_read_at_any_resolution(files: Any) -> None:
    with relied_on_by(f"{DATA} and {DARCY}"):
        assert len(files.train_db) == 3
        assert {nodes: len(test) for nodes, test in files.test_dbs.items()} == {5: 2, 7: 2}
        sample = files.train_db[0]
        assert sample.keys() == {"x", "y"}
        assert (sample["x"].shape, sample["x"].dtype) == ((1, 5, 5), torch.float32)
        processor, batches = files.data_processor, DataLoader(files.train_db, 3)
        processor.train()
        batch = processor.preprocess(next(iter(batches)))
        torch.testing.assert_close(batch["y"].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(batch["y"].std(), torch.tensor(1.0))
        processor.eval()
        output, batch = processor.postprocess(
            batch["y"], processor.preprocess(next(iter(DataLoader(files.train_db, 3))))
        )
        torch.testing.assert_close(output, batch["y"])


def train(files: Any, epochs: int, **options: object) -> None:
    model = small()
    optimizer = training.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = neuralop.Trainer(model=model, n_epochs=epochs, data_processor=files.data_processor)
    trainer.train(DataLoader(files.train_db), {}, optimizer, scheduler, **options)


def test_trainer_still_passes_more_than_models_and_losses_take(files: Any) -> None:
    with relied_on_by(TRAINER), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(files, 1)
        messages = {str(warning.message).partition("()")[0] for warning in found}
        assert {"FNO.forward", "LpLoss.__call__"} <= messages


@pytest.mark.filterwarnings("ignore:.*received unexpected keyword arguments")
def test_trainer_still_cannot_read_its_own_checkpoints(files: Any, tmp_path: Path) -> None:
    """Watch the reason for refusing to resume neuralop's Trainer."""
    with relied_on_by("recipes/neural_operator/options.py"):
        train(files, 1, save_every=1, save_dir=tmp_path / "saved")
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            train(files, 2, resume_from_dir=tmp_path / "saved")


def test_trainer_still_runs_in_float16_on_cuda_without_a_scaler() -> None:
    with relied_on_by(TRAINER):
        source = inspect.getsource(neuralop.Trainer)
        assert "torch.autocast(device_type=self.autocast_device_type)" in source
        assert "GradScaler" not in source
