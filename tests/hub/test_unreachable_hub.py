"""Tests of estimates of models on the hub while it is silent, refuses connections, or answers."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from huggingface_hub import constants
from tiny_configs import TINY_LLAMA

from hf_memopt.cli import main

MODEL = "people/tiny"
ESTIMATE = ["estimate", MODEL, "--seq-len", "16"]
PLAN = ["plan", MODEL, "--seq-len", "16", "--gpu", "1GiB"]


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture(autouse=True)
def _online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        use(f"http://127.0.0.1:{listening.getsockname()[1]}", monkeypatch)
        yield listening


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve() as fake:
        fake.repositories[MODEL] = {"config.json": json.dumps(TINY_LLAMA).encode()}
        use(fake.url, monkeypatch)
        yield fake


def num_connections(listening: socket.socket) -> int:
    listening.setblocking(False)
    count = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.mark.parametrize("command", [ESTIMATE, PLAN])
def test_a_silent_hub_is_asked_once(
    command: list[str], silent: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"model={MODEL!r}: no configuration was found; pass a folder with a config.json" in said
    assert len(said.splitlines()) == 1
    assert num_connections(silent) == 1
    assert constants.HF_HUB_OFFLINE is False


def test_a_folder_is_read_without_the_hub(silent: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    assert main(["estimate", str(tmp_path), "--seq-len", "16"]) == 0
    assert num_connections(silent) == 0


def test_a_downloaded_model_is_read_where_connections_are_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 10)
    assert main(ESTIMATE) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"SFTTrainer of {MODEL} as ")
    use("http://127.0.0.1:9", monkeypatch)
    assert main(ESTIMATE) == 0
    assert capsys.readouterr().out == first


def test_a_hub_that_knows_no_such_model_is_no_silent_one(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "people/other", "--seq-len", "16"]) == 2
    assert "people/other is not a local folder and is not a valid model identifier" in capsys.readouterr().err
    assert "HEAD /people/other/resolve/main/config.json" in hub.requests
