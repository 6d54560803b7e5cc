"""Code and weights of the hub, which no estimate runs or loads: kernels that models name, and trained weights."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


def no_hub_kernels() -> AbstractContextManager[Any]:
    """Disable the kernels of the hub in models made inside, those that their classes name included."""
    from transformers.integrations import hub_kernels

    refusal = FileNotFoundError("kernels are code of the hub, which no estimate runs")
    return patch.object(hub_kernels, "get_kernel_hub", create=True, side_effect=refusal)


def weights_from_config(kind: Any) -> AbstractContextManager[Any]:
    """Make transformers' auto class build models from their configurations inside; no weights are loaded."""

    def from_config(name: str, *, dtype: Any = None, torch_dtype: Any = None, **ignored: Any) -> Any:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_code(config, f"model={name!r}")
        with no_hub_kernels():
            return kind.from_config(config, dtype=dtype or torch_dtype, trust_remote_code=False)

    return patch.object(kind, "from_pretrained", from_config)
