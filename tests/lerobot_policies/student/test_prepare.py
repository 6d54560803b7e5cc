from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import save_file
from torch import Tensor

configuration_smolvla_reflow = LateModule("hf_memopt.lerobot.configuration_smolvla_reflow")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
diagnosis = LateModule("hf_memopt.lerobot.student.diagnosis")
diagnosis = LateModule("hf_memopt.lerobot.student.diagnosis")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
configs = LateModule("lerobot.configs")
policies = LateModule("lerobot.policies")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
lerobot_runs = LateModule("lerobot_runs")


WEIGHTS_FILE = "model.safetensors"


Edit = Callable[[Path], None]


def observation(policy: modeling_smolvla.SmolVLAPolicy, folder: Path) -> dict[str, Any]:
    preprocess, _ = policies.make_pre_post_processors(policy.config, pretrained_path=str(folder))
    torch.manual_seed(1)
    frame = {"observation.state": torch.randn(2), smolvla_toy.CAMERA: torch.rand(3, 32, 32), "task": smolvla_toy.TASK}
    batch: dict[str, Any] = preprocess(frame)
    return batch


def noise_for(policy: modeling_smolvla.SmolVLAPolicy) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, policy.config.chunk_size, policy.config.max_action_dim, generator=generator)


@pytest.fixture
def trained_student(toy_student: Path, tmp_path: Path) -> Path:
    """A student whose weights have moved, and whose teacher is gone."""
    folder = Path(shutil.copytree(toy_student, tmp_path / "trained"))
    torch.manual_seed(3)
    moved = {
        name: tensor + 0.05 * torch.randn_like(tensor) if "lm_expert" in name else tensor
        for name, tensor in lerobot_runs.weights(folder).items()
    }
    save_file(moved, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    edit_config(teacher_model_path="/nowhere/teacher")(folder)
    return folder


def edit_config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def test_prepared_student_is_its_teacher(toy_student: Path, toy_teacher: Path) -> None:
    config = configs.PreTrainedConfig.from_pretrained(toy_student)
    assert isinstance(config, configuration_smolvla_reflow.SmolVLAReflowConfig)
    assert config.use_reflow
    assert config.teacher_model_path == str(toy_teacher.resolve())
    assert (config.push_to_hub, config.repo_id, config.pretrained_path) == (False, None, None)
    student, teacher = lerobot_runs.weights(toy_student), lerobot_runs.weights(toy_teacher)
    assert student.keys() == teacher.keys()
    assert all(torch.equal(student[name], teacher[name]) for name in teacher)


@pytest.mark.parametrize("share_prefix", ["on", "off"])
def test_first_target_is_the_teachers_action_chunk(share_prefix: str, toy_student: Path, toy_teacher: Path) -> None:
    config = configs.PreTrainedConfig.from_pretrained(toy_student)
    config.share_prefix = share_prefix
    student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(toy_student, config=config, strict=True)
    teacher = modeling_smolvla.SmolVLAPolicy.from_pretrained(toy_teacher, strict=True)
    batch, noise = observation(student, toy_student), noise_for(student)
    targets = []
    teaching = student.teacher
    sample = teaching.sample
    teaching.sample = lambda *arguments: targets.append(sample(*arguments)) or targets[-1]
    loss, _ = student.train().forward(batch, noise=noise)
    loss.backward()
    chunk = teacher.predict_action_chunk(dict(batch), noise=noise)
    # The shared prefix runs the language and the state token in two parts, which rounds otherwise.
    tolerance = 1e-5 if share_prefix == "on" else 0
    torch.testing.assert_close(targets[0][..., :2], chunk, rtol=tolerance, atol=tolerance)


def test_prepare_student_takes_settings(toy_teacher: Path, tmp_path: Path) -> None:
    folder = prepare.prepare_student(
        str(toy_teacher), tmp_path / "student", reflow_time_sampling="one", teacher_num_steps=3
    )
    config = policy_files.load_config(folder)
    assert (config.reflow_time_sampling, config.teacher_num_steps) == ("one", 3)


def test_training_output_folder_stands_for_its_last_checkpoint(toy_teacher: Path, tmp_path: Path) -> None:
    run_folder = toy_teacher.parents[2]
    assert policy_files.resolve_checkpoint(run_folder).samefile(toy_teacher)
    assert policy_files.resolve_checkpoint(toy_teacher.parent).samefile(toy_teacher)
    folder = prepare.prepare_student(str(run_folder), tmp_path / "student")
    assert policy_files.load_config(folder).teacher_model_path == str(toy_teacher.resolve())


def test_relative_paths_work_from_any_directory(
    toy_teacher: Path, toy_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train the teacher by stock lerobot with a VLM at a relative path."""
    monkeypatch.chdir(toy_vlm.parent)
    teacher = Path(shutil.copytree(toy_teacher, tmp_path / "teacher"))
    edit_config(vlm_model_name=toy_vlm.name)(teacher)
    processor = teacher / "policy_preprocessor.json"
    processor.write_text(processor.read_text().replace(str(toy_vlm), toy_vlm.name))
    assert str(toy_vlm) not in processor.read_text()
    student = prepare.prepare_student(str(teacher), tmp_path / "student")
    monkeypatch.chdir(tmp_path)
    exported = prepare.export_student("student", Path("exported"), 1, "")
    for folder in (student, exported):
        assert policy_files.load_config(folder).vlm_model_name == str(toy_vlm)
        prepare.check_acts(folder)
    assert "PASSED" in diagnosis.diagnose("student", "cpu")


@pytest.mark.parametrize("field", ["teacher_model_path", "couplings_path", "vlm_model_name"])
def test_a_folder_given_as_a_flag_is_kept_by_its_absolute_path(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    make = configuration_smolvla_reflow.SmolVLAReflowConfig
    assert getattr(make(**{field: "here"}), field) == str(tmp_path / "here")
    assert getattr(make(**{field: "you/not_here"}), field) == "you/not_here"


def test_student_infers_without_its_teacher(trained_student: Path) -> None:
    student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(trained_student, strict=True)
    actions = student.predict_action_chunk(observation(student, trained_student))
    assert actions.shape == (1, 6, 2)
    assert actions.isfinite().all()


@pytest.mark.parametrize("num_steps", [1, 3])
def test_exported_policy_is_stock_and_acts_like_the_student(
    num_steps: int, trained_student: Path, tmp_path: Path
) -> None:
    folder = prepare.export_student(str(trained_student), tmp_path / "exported", num_steps, "# A card")
    policy = modeling_smolvla.SmolVLAPolicy.from_pretrained(folder, strict=True)
    assert (policy.config.type, policy.config.num_steps) == ("smolvla", num_steps)
    assert "teacher_model_path" not in (folder / "config.json").read_text()
    assert (folder / "README.md").read_text() == "# A card"
    student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(trained_student, strict=True)
    student.config.num_steps = num_steps
    batch, noise = observation(student, trained_student), noise_for(student)
    expected = student.predict_action_chunk(dict(batch), noise=noise)
    exported_batch = observation(policy, folder)
    assert torch.equal(policy.predict_action_chunk(dict(exported_batch), noise=noise), expected)
    _, postprocess = policies.make_pre_post_processors(policy.config, pretrained_path=str(folder))
    assert postprocess(expected).shape == (1, 6, 2)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_export_refuses_num_steps(num_steps: int, toy_student: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"num_steps={num_steps} must be at least 1"):
        prepare.export_student(str(toy_student), tmp_path / "exported", num_steps, "")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    "write",
    [
        lambda source, output: prepare.prepare_student(source, output),
        lambda source, output: prepare.export_student(source, output, 1, ""),
    ],
    ids=["prepare", "export"],
)
def test_existing_output_is_left_alone(write: Callable[..., Any], toy_student: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "precious").write_text("data")
    with pytest.raises(ValueError, match=r"output=.*output' exists; name a new folder"):
        write(str(toy_student), output)
    assert [file.name for file in tmp_path.iterdir()] == ["output"]
    assert (output / "precious").read_text() == "data"


def cut_weights(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1000])


def flip_header(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[20] ^= 0xFF
    (folder / WEIGHTS_FILE).write_bytes(data)


def drop_tensor(folder: Path) -> None:
    tensors = lerobot_runs.weights(folder)
    del tensors["model.action_out_proj.weight"]
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def remove(pattern: str) -> Edit:
    def edit(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return edit


def overwrite(content: bytes, name: str = "policy_preprocessor.json") -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return edit


def replace_by_link(folder: Path) -> None:
    remove("policy_preprocessor.json")(folder)
    (folder / "policy_preprocessor.json").symlink_to("nothing")


def set_padding(value: str) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "policy_preprocessor.json"
        document = json.loads(file.read_text())
        (step,) = (each for each in document["steps"] if each["registry_name"] == "tokenizer_processor")
        step["config"]["padding_side"] = value
        file.write_text(json.dumps(document))

    return edit


def set_weight(value: float) -> Edit:
    def edit(folder: Path) -> None:
        tensors = lerobot_runs.weights(folder)
        tensors["model.action_in_proj.bias"].fill_(value)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    return edit


BROKEN: dict[str, tuple[Edit, str]] = {
    "no config": (remove("config.json"), "holds no policy: there is no config.json"),
    "no weights": (remove(WEIGHTS_FILE), f"has no {WEIGHTS_FILE}; pass a complete checkpoint folder"),
    "truncated weights": (cut_weights, "truncated or damaged .*copy the checkpoint again"),
    "flipped header": (flip_header, "truncated or damaged .*copy the checkpoint again"),
    "missing tensor": (drop_tensor, "(?s)do not fit its config.json.*action_out_proj"),
    "other width": (edit_config(max_action_dim=6), "do not fit its config.json"),
    "other depth": (edit_config(num_vlm_layers=2), "do not fit its config.json"),
    "other policy": (edit_config(type="act"), "holds a policy of type 'act'; reflow needs one of: smolvla"),
    "no policy type": (overwrite(b"{}", "config.json"), "holds a policy of type None"),
    "half a config": (overwrite(b'{"type": "smol', "config.json"), "is not valid JSON .*copy the checkpoint again"),
    "binary config": (overwrite(b"\xff\xfe\x00", "config.json"), "is not valid JSON .*copy the checkpoint again"),
    "bad field": (edit_config(chunk_size="eight"), "(?s)not a usable configuration.*correct that field"),
    "a config that is a list": (
        overwrite(b"[]", "config.json"),
        "holds list and no JSON object; copy",
    ),
    "a config nested deeply": (
        overwrite(b"[" * 100_000, "config.json"),
        "is not valid JSON .*copy the checkpoint again",
    ),
    "no such model": (
        edit_config(vlm_model_name="/nowhere"),
        "vlm_model_name='/nowhere' .*write its folder or hub id into config.json",
    ),
    "no processors": (remove("policy_preprocessor.json"), "has no policy_preprocessor.json.*migrate_policy"),
    "no postprocessor": (remove("policy_postprocessor.json"), "has no policy_postprocessor.json"),
    "steps that are no list": (overwrite(b'{"steps": null}'), "steps must be a list of objects"),
    "a processor that is null": (overwrite(b"null"), "holds NoneType and no JSON object"),
    "an empty processor": (overwrite(b""), "is not valid JSON .*copy the checkpoint again"),
    "a processor that leads nowhere": (replace_by_link, "has no policy_preprocessor.json"),
    "no statistics": (remove("*normalizer*.safetensors"), "has no policy_.*normalizer.*safetensors"),
    "a setting that is none": (set_padding("sideways"), "cannot act on an observation .*copy the checkpoint again"),
    "NaN in a weight": (set_weight(float("nan")), f"{WEIGHTS_FILE}: model.action_in_proj.bias is not finite; take an"),
    "infinity in a weight": (set_weight(float("inf")), f"{WEIGHTS_FILE}: model.action_in_proj.bias is not finite"),
    "a weight that overflows": (set_weight(3e38), "gives actions that are not finite; take an earlier checkpoint"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_prepare_student_refuses_broken_teacher(defect: str, toy_teacher: Path, tmp_path: Path) -> None:
    edit, message = BROKEN[defect]
    teacher = Path(shutil.copytree(toy_teacher, tmp_path / "teacher"))
    edit(teacher)
    with pytest.raises(ValueError, match=message) as caught:
        prepare.prepare_student(str(teacher), tmp_path / "student")
    assert str(teacher) in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize("teacher", ["/nowhere/teacher", "nobody/nothing", "not a name!"])
def test_prepare_student_refuses_missing_teacher(teacher: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a checkpoint folder nor a hub id that can be reached") as caught:
        prepare.prepare_student(teacher, tmp_path / "student")
    assert repr(teacher) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_damaged_student(toy_student: Path, tmp_path: Path) -> None:
    student = Path(shutil.copytree(toy_student, tmp_path / "student"))
    drop_tensor(student)
    with pytest.raises(ValueError, match=r"(?s)do not fit its config.json.*action_out_proj"):
        prepare.export_student(str(student), tmp_path / "exported", 1, "")
    assert [file.name for file in tmp_path.iterdir()] == ["student"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_config(use_cache=False), "the teacher's config in .* has use_cache=false"),
        (edit_config(chunk_size=4, n_action_steps=4), r"differ in chunk_size \(student 6, teacher 4\)"),
        (edit_config(num_vlm_layers=2), r"differ in num_vlm_layers \(student 4, teacher 2\)"),
        (cut_weights, "truncated or damaged"),
        (remove("policy_preprocessor.json"), "has no policy_preprocessor.json"),
    ],
)
def test_training_refuses_a_changed_teacher_before_it_loads_anything(
    edit: Edit, message: str, toy_student: Path, toy_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Path(shutil.copytree(toy_teacher, tmp_path / "teacher"))
    edit(teacher)
    config = configs.PreTrainedConfig.from_pretrained(toy_student)
    config.teacher_model_path = str(teacher)
    monkeypatch.setattr(modeling_smolvla.SmolVLAPolicy, "__init__", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match=message):
        modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(toy_student, config=config, dataset_stats={})


def test_student_that_cannot_sample_is_refused(toy_student: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"use_cache=false: .*set --policy.use_cache=true"):
        prepare.prepare_student(str(toy_student), tmp_path / "student", use_cache=False)
    assert list(tmp_path.iterdir()) == []


def test_reflow_without_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use_reflow=true needs teacher_model_path: pass --policy.teacher_model_path"):
        configuration_smolvla_reflow.SmolVLAReflowConfig(use_reflow=True)


def test_share_prefix_on_names_the_weight_that_differs(trained_student: Path, toy_teacher: Path) -> None:
    tensors = lerobot_runs.weights(trained_student)
    name = next(name for name in tensors if "text_model.layers.0.mlp" in name)
    tensors[name] = tensors[name] + 1
    save_file(tensors, trained_student / WEIGHTS_FILE, metadata={"format": "pt"})
    edit_config(teacher_model_path=str(toy_teacher), share_prefix="on")(trained_student)
    student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(trained_student)
    part = name.split("vlm.")[-1]
    with pytest.raises(ValueError, match=f"share_prefix=on cannot be had: the student's VLM differs .*{part}"):
        student.load_teacher_model()
