"""Teachers at home in files."""

from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from hf_memopt.weights import OffloadedTeacher


def checkpoint(module: nn.Module, folder: Path) -> Path:
    """Write a module's own file, as a trainer would."""
    path = folder / "model.safetensors"
    weights = {name: tensor for name, tensor in module.state_dict().items() if tensor.numel()}
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, path)
    return path


def at_home_in_file(module: nn.Module, folder: Path, mode: str = "swap", **options: object) -> OffloadedTeacher:
    options = {"device": "cpu", "files": (), "disk": folder, **options}
    return OffloadedTeacher(module, mode=mode, home="file", **options)
