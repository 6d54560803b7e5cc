"""From a teacher's checkpoint to a student's, and from a trained student's to a stock policy's."""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from httpx import HTTPError
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors.torch import save_model

from hf_memopt.disk.files_on_disk import new_folder
from hf_memopt.lerobot.files.checkpoint_files import (
    COPY_AGAIN,
    PREPROCESSOR_FILE,
    adapter_files,
    base_name,
    blank_observation,
    check_processors,
    is_adapter,
    load_processors,
    read_object,
)
from hf_memopt.lerobot.files.policy_files import (
    WEIGHTS_FILE,
    check_normalizers,
    load_config,
    load_policy,
    resolve_checkpoint,
)
from hf_memopt.lerobot.flow.known_flows import flow_of
from hf_memopt.lerobot.flow.reflow_options import absolute_if_local, is_student
from hf_memopt.ranges import COUNT

# A derived checkpoint must not be pushed over the one it came from.
_FRESH = {"pretrained_path": None, "repo_id": None, "push_to_hub": False, "use_peft": False}


def prepare_student(teacher: str, output: Path, **settings: Any) -> Path:
    """Write a student's checkpoint (`smolvla_reflow`, say) that starts as an exact copy of its teacher.

    `settings` are fields of its configuration. Raises ValueError, with nothing written, if the teacher cannot be read
    or does not act (see `check_acts`), or `output` exists.
    """
    folder = resolve_checkpoint(teacher)
    config = load_config(folder)
    files = check_processors(folder)
    reference = str(folder.resolve()) if Path(teacher).expanduser().exists() else teacher
    fields = {
        "use_reflow": True,
        "teacher_model_path": reference,
        "reflow_round": config.reflow_round + 1 if is_student(config) and config.use_reflow else 1,
        **_FRESH,
        **settings,
    }
    student_config = PreTrainedConfig.get_choice_class(f"{flow_of(config).stock_type}_reflow")
    student = student_config(**{**_stock_fields(config), **fields})
    acting = check_acts(folder)
    with _draft(output, student, folder, files) as draft:
        _put_weights(draft, folder, acting)
    return output


def export_student(policy: str, output: Path, num_steps: int, card: str, *, adapter_only: bool = False) -> Path:
    """Write a plain checkpoint (of type `smolvla`, say) that stock lerobot loads and runs with `num_steps` Euler steps.

    `card` is the text of `README.md`. An adapter is merged into the weights; with `adapter_only` it is written alone,
    and needs its base policy to act. A configuration of real-time chunking keeps at most `num_steps` as its
    `max_guidance_weight`, with which the first step brings a chunk to the one before it, and not past it.

    Raises ValueError, with nothing written, for a policy that cannot be read or does not act (see `check_acts`), if
    `output` exists, or for `adapter_only` without an adapter.
    """
    COUNT.check("num_steps", num_steps)
    folder = resolve_checkpoint(policy)
    files = check_processors(folder)
    config = load_config(folder)
    if adapter_only and not is_adapter(folder):
        raise ValueError(f"adapter_only: {folder} holds whole weights and no adapter; leave --adapter-only out")
    rtc = config.rtc_config
    if rtc is not None:
        rtc = dataclasses.replace(rtc, max_guidance_weight=min(rtc.max_guidance_weight, float(num_steps)))
    steps = {flow_of(config).steps_field: num_steps, "rtc_config": rtc}
    fields = {**_stock_fields(config), **_FRESH, **steps, "use_peft": adapter_only}
    exported = _stock_config(config)(**fields)
    acting = check_acts(folder)
    check_normalizers(folder, config)
    with _draft(output, exported, folder, files) as draft:
        (draft / "README.md").write_text(card)
        if adapter_only:
            settings, weights = adapter_files(folder)
            shutil.copyfile(weights, draft / weights.name)
            content = {**read_object(settings), "base_model_name_or_path": absolute_if_local(base_name(folder))}
            (draft / settings.name).write_text(json.dumps(content, indent=2))
        else:
            _put_weights(draft, folder, acting)
    return output


def check_acts(folder: Path) -> PreTrainedPolicy:
    """Return the policy after it has acted on zeros, in one Euler step; ValueError if numbers are not finite."""
    policy = load_policy(folder, **{flow_of(load_config(folder)).steps_field: 1})
    for name, tensor in policy.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(f"{folder / WEIGHTS_FILE}: {name} is not finite; take an earlier checkpoint")
    preprocess, postprocess = load_processors(policy.config, folder, {"device_processor": {"device": "cpu"}})
    try:
        noise = torch.zeros(1, policy.config.chunk_size, policy.config.max_action_dim)
        actions = postprocess(policy.predict_action_chunk(blank_observation(policy.config, preprocess), noise=noise))
    except Exception as error:
        raise ValueError(
            f"the policy in {folder} cannot act on an observation of its own input_features: {error}; {COPY_AGAIN}"
        ) from error
    if not actions.isfinite().all():
        raise ValueError(f"the policy in {folder} gives actions that are not finite; take an earlier checkpoint")
    return policy


def push_to_hub(folder: Path, repo_id: str, private: bool = False) -> str:
    """Upload an exported policy to the hub and return its address. Creates the repository if needed."""
    api = HfApi()
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload reflowed policy")
    except (HTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{folder} could not be pushed to {repo_id!r} ({error}); log in with `hf auth login`, check the name, and "
            f"run `hf upload {repo_id} {folder}`"
        ) from error
    return str(commit.repo_url)


def check_new(output: Path) -> None:
    if output.exists():
        raise ValueError(f"output={str(output)!r} exists; name a new folder or remove this one")


def _stock_config(config: PreTrainedConfig) -> Any:
    return PreTrainedConfig.get_choice_class(flow_of(config).stock_type)


def _stock_fields(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        field.name: getattr(config, field.name) for field in dataclasses.fields(_stock_config(config)) if field.init
    }


@contextmanager
def _draft(output: Path, config: PreTrainedConfig, source: Path, files: Iterable[Path]) -> Iterator[Path]:
    """Yield a draft of `output` with a policy's configuration and copies of its processors' files."""
    check_new(output)
    with new_folder(output) as draft:
        for file in files:
            target = draft / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
        _name_tokenizer_absolutely(draft / PREPROCESSOR_FILE)
        config.save_pretrained(draft)
        yield draft


def _put_weights(draft: Path, source: Path, policy: PreTrainedPolicy) -> None:
    if is_adapter(source):
        save_model(policy, str(draft / WEIGHTS_FILE))  # as lerobot saves them
    else:
        shutil.copyfile(source / WEIGHTS_FILE, draft / WEIGHTS_FILE)


def _name_tokenizer_absolutely(file: Path) -> None:
    content = read_object(file)
    for step in content["steps"]:
        settings = step.get("config", {})
        if "tokenizer_name" in settings and "artifacts" not in step:
            settings["tokenizer_name"] = absolute_if_local(settings["tokenizer_name"])
    file.write_text(json.dumps(content, indent=2))
