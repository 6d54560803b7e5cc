"""Lines of JSON that training scripts print for those who watch them below a memory limit."""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def show_rest() -> float:
    """Print the memory of the process that belongs to no file, and return its CPU time so far."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    show(rest_bytes=(int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"))
    return time.process_time()


def show_end(models: Iterable[nn.Module], begun_s: float, files: Iterable[Path] = ()) -> None:
    """Print the CPU time since `begun_s`, and a digest of models' state dicts and of files."""
    cpu_s, digest = time.process_time() - begun_s, hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            if isinstance(tensor, Tensor):
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for file in sorted(files):
        digest.update(file.read_bytes())
    show(digest=digest.hexdigest(), cpu_s=cpu_s)
