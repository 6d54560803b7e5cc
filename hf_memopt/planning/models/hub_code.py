"""Kernels of the hub that models name: code, which no estimate runs."""

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import find_adapter_config_file


def check_code(config: PretrainedConfig, source: str) -> None:
    """Raise ValueError if a configuration names a kernel of the hub, such as kernels-community/flash-attn."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            check_code(value, f"{source}: {name}")
        elif name.endswith("_implementation_internal") and "/" in str(value):
            field = name.removeprefix("_").removesuffix("_internal")
            raise ValueError(
                f"{source}: {field}={value!r} is code of the hub, which is not run; remove it, or name sdpa"
            )


def check_model(name: str, revision: str = "main") -> None:
    """Raise ValueError if a model's configuration names a kernel of the hub, or that of the base of an adapter."""
    adapter = find_adapter_config_file(name, revision=revision)
    if adapter is not None:
        name, revision = json.loads(Path(adapter).read_text())["base_model_name_or_path"], "main"
    check_code(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False), "its config.json")
