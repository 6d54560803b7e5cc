"""Checkpoints that were published in few bits: how transformers trains them, or the reason why it is not simulated.

Source: quantizers `bnb_4bit`, `bnb_8bit`, `mxfp4`, `finegrained_fp8`, `gptq`, `awq` and `compressed_tensors` of
transformers 5.5, and its `validate_quantization_for_training`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class PublishedWeights:
    """The form in which transformers trains a checkpoint, by its `quantization_config`.

    Attributes:
        quantize: one of `LAYERS`; "none", no layer is trained in few bits.
        kept: patterns of the names of layers that are not quantised; None, as transformers chooses.
        compute_dtype: in which layers in 4 bits multiply; None, in the dtype of the other weights.
        storage: in which 4 bits are packed.
        dtype: of the other weights, where the configuration has none.
        note: a remark for the answer, about `{dtype}`.
    """

    quantize: str = "none"
    kept: tuple[str, ...] | None = None
    compute_dtype: str | None = None
    storage: str = "uint8"
    dtype: str | None = None
    note: str = ""

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
