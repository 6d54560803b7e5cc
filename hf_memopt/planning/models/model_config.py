"""Configurations of transformers models, looked at before anything is built from them.

Source of the rules for checkpoints in few bits: quantizers `bnb_4bit`, `bnb_8bit`, `mxfp4`, `finegrained_fp8`, `gptq`,
`awq` and `compressed_tensors` of transformers 5.5, and its `validate_quantization_for_training`.
"""

import difflib
import inspect
import json
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

from hf_memopt.planning.models.accelerate_config import Sharing
from hf_memopt.planning.models.hub_code import check_code
from hf_memopt.planning.models.model_batches import OWN_STEP
from hf_memopt.planning.models.pipelines import find_denoiser
from hf_memopt.planning.simulation import DEVICE_TYPE
from hf_memopt.planning.simulation.child_process import is_too_large
from hf_memopt.planning.simulation.data_dependent import UnsupportedOperationError
from hf_memopt.planning.simulation.patched_transformers import no_hub_kernels
from hf_memopt.ranges import COUNT, COUNT_OR_ZERO, Range
from hf_memopt.text_files import read_values

_BITSANDBYTES, _MXFP4 = "bitsandbytes", "mxfp4"
# The threshold of outliers with which LLM.int8 is simulated.
_THRESHOLD = 6.0
_NUMBER = re.compile(r"(?:^|\.)\d")
_IN_DTYPE = "remove quantization_config from a copy of its config.json to simulate that"
_NOT_SIMULATED = (
    "{} is not simulated; name the checkpoint that it was made from, with quantize=nf4 or quantize=int8-llm for "
    "adapters on few bits"
)
_REFUSED = {
    "fp8": (
        "transformers does not train FP8, but loads it in dtype with FineGrainedFP8Config(dequantize=True); "
        f"{_IN_DTYPE}"
    ),
    "compressed-tensors": (
        "training in compressed-tensors is not simulated; CompressedTensorsConfig(run_compressed=False) loads the "
        f"weights in dtype; {_IN_DTYPE}"
    ),
    "gptq": _NOT_SIMULATED.format("training adapters on GPTQ"),
    "awq": _NOT_SIMULATED.format("training adapters on AWQ"),
}
_DEQUANTISED = (
    "The checkpoint is in MXFP4, which transformers does not train: load it with "
    "quantization_config=Mxfp4Config(dequantize=True), and the experts are trained in {dtype}, as simulated here."
)
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
# A layer takes some 50 ms to simulate, and no published model has a tenth as many.
MAX_LAYERS = 1000

# transformers gives each label a name.
_NUM_LABELS = Range(at_least=0, at_most=10**6, whole=True)

# A chunk_size of -1 is none.
_SIZE = re.compile(r"(num|n|d)_\w+|(?!chunk_size$)\w+_(size|dim|heads|layers|channels)")
_NEVER_ZERO = re.compile(
    r"(\w+_)?(hidden_size|(?<!type_)(?<!additional_)vocab_size|head_dim|n_embd|d_model|heads|n_head)"
)
# Sizes that decide on bytes, as transformers' classes call them.
_DECISIVE = re.compile(
    r"((moe_)?intermediate_|hidden_)sizes?|vocab_size|d_model|n_embd|embed_dims?|(hidden_|head_)?dim|d_ff|d_kv|depths"
    r"|((encoder|decoder)_)?ffn_dim|(num_)?((encoder|decoder|hidden)_)?layers|n_layers?"
    r"|((encoder|decoder)_)?(num_)?((attention|key_value)_)?heads|n_heads?|(moe_)?num_(local_)?experts|n_routed_experts"
)
_LAYERS = re.compile(r"((num|n)_)?((hidden|encoder|decoder)_)?layers?")


@dataclass(frozen=True)
class PublishedWeights:
    """The form in which transformers trains a checkpoint, by its `quantization_config`."""

    quantize: str = "none"  # one of `LAYERS`; "none", no layer is trained in few bits
    kept: tuple[str, ...] | None = None  # patterns of layers that are not quantised; None, as transformers chooses
    compute_dtype: str | None = None  # in which layers in 4 bits multiply; None, in that of the other weights
    storage: str = "uint8"  # in which 4 bits are packed
    dtype: str | None = None  # of the other weights, where the configuration has none
    note: str = ""  # a remark for the answer, about `{dtype}`

    @property
    def treats_layers_alike(self) -> bool:
        return not any(_NUMBER.search(pattern) for pattern in self.kept or ())


def published_weights(config: Any, source: str) -> PublishedWeights:
    """Return how a checkpoint is trained; refuse one that transformers does not train, or in ways not simulated."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return PublishedWeights()
    said: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    method = str(said.get("quant_method", _BITSANDBYTES if "load_in_4bit" in said or "load_in_8bit" in said else None))
    if method == _MXFP4:
        return PublishedWeights(dtype="bfloat16", note=_DEQUANTISED)
    if method != _BITSANDBYTES:
        reason = _REFUSED.get(method, _NOT_SIMULATED.format(f"training on quant_method={method!r}"))
        raise ValueError(f"{source}: its configuration has quantization_config.quant_method={method!r}: {reason}")
    return _of_bitsandbytes(said, f"{source}: quantization_config")


def _of_bitsandbytes(said: Mapping[str, Any], source: str) -> PublishedWeights:
    skipped = said.get("llm_int8_skip_modules")
    kept = tuple(map(str, skipped)) if isinstance(skipped, list) else None
    if said.get("load_in_8bit"):
        for name, only in (("llm_int8_threshold", _THRESHOLD), ("llm_int8_has_fp16_weight", False)):
            if said.get(name, only) != only:
                raise ValueError(f"{source}.{name}={said[name]} is not simulated; only {only} is")
        return PublishedWeights("int8-llm", kept)
    if not said.get("load_in_4bit"):
        raise ValueError(f"{source} has neither load_in_4bit nor load_in_8bit; remove it from a copy of config.json")
    kind = said.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise ValueError(
            f"{source}.bnb_4bit_quant_type={kind!r} is not simulated; write 'nf4', which takes the same memory, in a "
            "copy of its config.json"
        )
    compute_dtype = str(said.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    storage = str(said.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    quantize = "nf4-double" if said.get("bnb_4bit_use_double_quant") else "nf4"
    return PublishedWeights(quantize, kept, compute_dtype, storage, dtype=compute_dtype)


class _NotFoundError(ValueError):
    """No folder, no file, and no downloaded model has this name."""


def read_config(model: str) -> Any:
    """Find a hub id, a folder, or a config.json, of transformers or of a denoiser."""
    if Path(model).exists() and (denoiser := find_denoiser(model)) is not None:
        return denoiser
    try:
        values = _read_values(model)
    except _NotFoundError:
        if (denoiser := find_denoiser(model)) is not None:
            return denoiser
        raise
    source = f"model={model!r}"
    _check_fields(values, source)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # a forged file can raise anything
        raise ValueError(f"{source}: transformers refuses its config.json: {' '.join(str(error).split())}") from error
    if not isinstance(config.get_text_config(), PretrainedConfig):
        raise ValueError(f"{source}: its config.json has a text_config, which {type(config).__name__} does not know")
    check_code(config, source)
    check_sizes(vars(config), source)
    published_weights(config, source)
    return config


def _read_values(model: str) -> dict[str, Any]:
    """Return the fields of a config.json: in a folder, a file, or on the hub."""
    place = Path(model)
    if place.exists():
        values = _parsed(place if place.is_file() else _in_folder(place))
    else:
        try:
            values = PretrainedConfig.get_config_dict(model)[0]
        except (OSError, ValueError, RecursionError) as error:
            raise _NotFoundError(_not_found(model, error)) from error
    if "model_type" not in values and "type" in values:
        raise ValueError(
            f"model={model!r} is a LeRobot policy of type {values['type']!r}, and no transformers model; for the "
            f"distillation of a SmolVLA give recipe='reflow_smolvla'; for another training, {OWN_STEP}"
        )
    return values


def _check_fields(values: dict[str, Any], source: str) -> None:
    model_type = values.get("model_type")
    if not isinstance(model_type, str | None):
        raise ValueError(f"{source}: model_type={model_type!r} must be a text; correct its config.json")
    _NUM_LABELS.check(f"{source}: num_labels", values.get("num_labels"))
    if not isinstance(values.get("quantization_config", {}), dict | None):
        raise ValueError(
            f"{source}: quantization_config={values['quantization_config']!r} must be an object; remove it"
        )
    check_sizes(values, source)
    if model_type in CONFIG_MAPPING:
        return
    if "auto_map" in values:
        raise ValueError(
            f"{source}: transformers has no model_type={model_type!r}; the model's code lies in its repository "
            f"(auto_map) and is not run; {OWN_STEP}"
        )
    if model_type is None:
        raise ValueError(f"{source}: its config.json has no model_type, by which transformers finds its class; add it")
    raise ValueError(
        f"{source}: transformers {__version__} has no model_type={model_type!r}; correct it, or update transformers"
    )


def _in_folder(folder: Path) -> Path:
    if (folder / _CONFIG).is_file():
        return folder / _CONFIG
    if (folder / _ADAPTER).is_file():
        adapter = _parsed(folder / _ADAPTER)
        raise ValueError(
            f"model={str(folder)!r} holds an adapter of PEFT; give the model that it is for, "
            f"{adapter.get('base_model_name_or_path')}, with lora_rank={adapter.get('r')}"
        )
    raise ValueError(f"model={str(folder)!r}: there is no {_CONFIG} in this folder; name one with a {_CONFIG}")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        values = read_values(path)
    except json.JSONDecodeError as error:
        is_trailing = error.doc[error.pos :][:1] in ("}", "]") and error.doc[: error.pos].rstrip().endswith(",")
        wrong = "a comma before the closing bracket" if is_trailing else error.msg
        raise ValueError(f"model={str(path)!r}, line {error.lineno}: not JSON ({wrong}); correct it") from error
    except ValueError as error:
        raise ValueError(f"model={str(path)!r}: {error}; name a {_CONFIG}, or the folder with it") from error
    if not isinstance(values, dict):
        raise ValueError(f"model={str(path)!r} holds a {type(values).__name__}, and no object with fields; correct it")
    return values


def _not_found(model: str, error: Exception) -> str:
    place = Path(model)
    siblings = [each.name for each in place.parent.iterdir()] if place.parent.is_dir() else []
    alike = difflib.get_close_matches(place.name, siblings, n=1)
    if alike:
        return f"there is no folder model={model!r}; there is {place.parent / alike[0]}"
    if place.parent != Path() and place.parent.is_dir():
        return f"there is no folder model={model!r} in {place.parent}; name a folder with a {_CONFIG}, or a hub id"
    return (
        f"model={model!r}: no configuration was found; pass a folder with a {_CONFIG}, such a file, or a hub id (when "
        f"offline, one that was downloaded before): {error}"
    )


def check_sizes(fields: Mapping[str, Any], source: str) -> None:
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig) or (isinstance(value, dict) and name.endswith("_config")):
            check_sizes(value if isinstance(value, dict) else vars(value), f"{source}: {name}")
        elif isinstance(value, int) and _SIZE.fullmatch(name):
            (COUNT if _NEVER_ZERO.fullmatch(name) else COUNT_OR_ZERO).check(f"{source}: {name}", value)
            if _LAYERS.fullmatch(name) and value > MAX_LAYERS:
                raise ValueError(
                    f"{source}: {name}={value} are more than {MAX_LAYERS} layers, which take too long to simulate; "
                    "use two smaller numbers and extrapolate, since each layer adds the same"
                )


def unsaid_sizes(model: str, config: Any) -> tuple[str, ...]:
    """Return assumptions on the code and the sizes that a config.json, or a part of it, leaves to its class."""
    if not isinstance(config, PretrainedConfig):
        return ()
    values = _read_values(model)
    ignored = f"code of its own (auto_map) is not run; transformers' {type(config).__name__} was taken"
    return (*_unsaid(config, values, "the configuration"), *([ignored] if "auto_map" in values else []))


def _unsaid(config: PretrainedConfig, values: Mapping[str, Any], part: str) -> Iterator[str]:
    called_else = {name: alias for alias, name in config.attribute_map.items()}
    defaults = {name: each.default for name, each in inspect.signature(type(config)).parameters.items()}
    names = [
        name
        for name in vars(config)
        if _DECISIVE.fullmatch(name)
        and defaults.get(name) not in (None, inspect.Parameter.empty)
        and not {name, called_else.get(name)} & values.keys()
    ]
    if names:
        taken = _enumerated([str(getattr(config, name)) for name in names])
        default, were = ("default", "was") if len(names) == 1 else ("defaults", "were")
        yield f"{part} does not say {_enumerated(names)}; {type(config).__name__}'s {default}, {taken}, {were} taken"
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            within = values.get(name)
            yield from _unsaid(value, within if isinstance(within, dict) else {}, f"{part}'s {name}")


def _enumerated(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


@contextmanager
def training(source: str) -> Iterator[None]:
    """Turn an error of the model's own code into one line; errors of the simulation are such lines already."""
    try:
        with no_hub_kernels():
            yield
    except UnsupportedOperationError:
        raise
    except Exception as error:
        place = _place_in_model(error)
        if place is None or is_too_large(error):
            raise
        raise ValueError(
            f"{source}: the model cannot be trained with this configuration and batch: {place} raises "
            f"{type(error).__name__} ({' '.join(str(error).split())}); if plain training runs, {OWN_STEP}"
        ) from error


@contextmanager
def preparing(source: str, sharing: Sharing) -> Iterator[None]:
    """Turn an error of an engine into one line."""
    try:
        yield
    except (UnsupportedOperationError, ValueError):
        raise
    except Exception as error:
        if not sharing.has_group or is_too_large(error):
            raise
        said = " ".join(str(error).split()).replace(DEVICE_TYPE, "cuda")
        raise ValueError(
            f"{source}: engine={sharing.engine!r} with optimizer_on={sharing.optimizer_on!r} cannot prepare this model "
            f"({type(error).__name__}: {said}); use another engine"
        ) from error


def _place_in_model(error: Exception) -> str | None:
    """Return the innermost line of a model's code, or of lerobot's, that an error passed through."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = Path(frame.f_code.co_filename).name
        if "modeling_" in name or frame.f_globals["__name__"].startswith("lerobot."):
            place = f"{name}, line {line},"
    return place
