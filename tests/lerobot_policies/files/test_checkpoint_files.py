import json
from pathlib import Path

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import save_file

checkpoint_files = LateModule("hf_memopt.lerobot.files.checkpoint_files")
dynamic_module_utils = LateModule("transformers.dynamic_module_utils")


def test_a_missing_file_is_named_with_the_callers_remedy(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("config.json", "folder.json"):
        with pytest.raises(ValueError, match=f"{tmp_path} has no {name}; pass a complete checkpoint folder"):
            checkpoint_files.file_in(tmp_path, name)
    with pytest.raises(ValueError, match=f"{tmp_path} has no config.json; look again"):
        checkpoint_files.file_in(tmp_path, "config.json", "look again")


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("other.json", True),
        ("../../blobs/hash", True),
        ("../../blobs/../secret", False),
        ("../other/config.json", False),
        ("/etc/hostname", False),
    ],
)
def test_links_within_the_hubs_cache(target: str, allowed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "models--robots--teacher" / "snapshots" / "0123"
    for file in ("other.json", "../../blobs/hash", "../../secret", "../other/config.json"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    (folder / "config.json").symlink_to(target)
    if allowed:
        assert checkpoint_files.file_in(folder, "config.json") == folder / "config.json"
    else:
        with pytest.raises(ValueError, match=r"config.json is a link out of its folder, to /"):
            checkpoint_files.file_in(folder, "config.json")


def test_blobs_that_are_a_link_themselves_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "repository" / "blobs").symlink_to(tmp_path)
    (folder / "config.json").symlink_to("../../blobs/secret")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        checkpoint_files.file_in(folder, "config.json")


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"type": "smolvla", "robot": "\N{GREEK SMALL LETTER PI}"}, ensure_ascii=False))
    assert checkpoint_files.read_object(file) == {"type": "smolvla", "robot": "\N{GREEK SMALL LETTER PI}"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not valid JSON"),
        (b'{"type": ', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "holds list and no JSON object"),
        (b"null", "holds NoneType and no JSON object"),
    ],
)
def test_what_holds_no_object_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} {complaint}.*; copy the checkpoint again"):
        checkpoint_files.read_object(file)


def test_a_header_tells_whether_the_file_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(100)}, file)
    checkpoint_files.check_header(file)
    whole = file.read_bytes()
    for content in (whole[:-1], whole + b"x", b"", b"no safetensors at all"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file} is truncated or damaged .*; copy the checkpoint again"):
            checkpoint_files.check_header(file)


def test_code_of_a_repository_is_refused_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    with checkpoint_files.no_remote_code(), pytest.raises(ValueError, match="trust_remote_code"):
        dynamic_module_utils.resolve_trust_remote_code(None, "you/model", has_local_code=False, has_remote_code=True)
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE == before != 0
