"""Policies whose folder holds a PEFT adapter in place of weights, as lerobot's `--peft.*` leaves it."""

from pathlib import Path

from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors import safe_open

from hf_memopt.lerobot.files.checkpoint_files import check_header, file_in, read_object

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_BASE = "base_model_name_or_path"


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def adapter_files(folder: Path) -> list[Path]:
    """Return an adapter's own two files; ValueError if one is missing, damaged or a link out of the folder."""
    files = [file_in(folder, name) for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)]
    check_header(files[1])
    return files


def base_name(folder: Path) -> str:
    """Return the folder or hub id of the policy that an adapter was trained on."""
    file = file_in(folder, ADAPTER_CONFIG_FILE)
    name = read_object(file).get(_BASE)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file} names no base policy; write its folder or hub id into {_BASE}")
    return name


def merged(policy: PreTrainedPolicy, folder: Path) -> PreTrainedPolicy:
    """Add an adapter to its base policy's weights, in place, and return the policy; ValueError if that cannot be."""
    from peft import PeftModel, get_peft_model_state_dict  # slow to import, and an extra

    adapter_files(folder)
    try:
        model = PeftModel.from_pretrained(policy, folder, torch_device="cpu")
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        first = " ".join(str(error).split("\n\t")[:2])  # of as many lines as there are weights
        raise ValueError(f"the adapter in {folder} does not fit its base policy: {first}") from error
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as saved:
        different = sorted(set(saved.keys()) ^ get_peft_model_state_dict(model).keys())
    if different:
        raise ValueError(
            f"the adapter in {folder} does not fit its base policy: {', '.join(different[:3])} is on one side alone; "
            "pass the folder as training left it"
        )
    try:
        return model.merge_and_unload()
    except (AttributeError, NotImplementedError) as error:
        kind = getattr(model.active_peft_config.peft_type, "value", "?")
        raise ValueError(
            f"the adapter in {folder} is of a kind that has no weights to merge ({kind}); train one of LoRA's kind"
        ) from error
