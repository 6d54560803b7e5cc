"""Tests of the page for a browser, on which each question is one run of a command, with any text in its fields."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from hf_memopt.cli import main

FILE = Path(__file__).parents[1] / "space" / "app.py"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("space_app", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_this_process(app: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the seconds that a new process takes to import torch."""

    def answer_of(words: list[str], folder: Path) -> tuple[str, bool]:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            status = main(words)
        said = capsys.readouterr()
        return (said.err if status else said.out), status != 0

    monkeypatch.setattr(app, "answer_of", answer_of)


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "uploaded.json").write_text(json.dumps(TINY))
    return str(tmp_path / "uploaded.json")


def form(app: ModuleType, config: str | None = None, **changed: Any) -> list[Any]:
    """Return the initial fields with changes."""
    fields = {"model": "", "config": config, "batch": 2, "passes": 1, "checkpointing": "full", "offload": "off"}
    fields |= {"gpu": "1GiB", "seq_len": 16, "learns": "LoRA", "rank": 4}
    fields |= {name: values[0] for name, (values, _) in app.SHARED.items()}
    assert changed.keys() <= fields.keys()
    return list((fields | changed).values())


@pytest.mark.usefixtures("in_this_process")
def test_an_estimate_has_verdict_text_drawing_and_command(app: ModuleType, config: str) -> None:
    verdict, text, drawn, command = app.estimate(*form(app, config, gpu="8GiB", dtype="bfloat16"))
    assert verdict.startswith("### It fits: 0.6 of 8.0 GiB")
    assert text.startswith("config.json as LlamaForCausalLM")
    assert "timeline" not in text
    assert drawn.startswith('<iframe srcdoc="&lt;!DOCTYPE html')
    assert command == (
        "hf-memopt estimate --gpu=8GiB --seq-len=16 --lora-rank=4 --dtype=bfloat16 --batch-size=2 --accumulation=1 "
        "--checkpointing=full --offload=off -- config.json"
    )


@pytest.mark.usefixtures("in_this_process")
def test_what_does_not_fit_is_told_with_the_command_that_looks_further(app: ModuleType, config: str) -> None:
    verdict, text, _, _ = app.estimate(*form(app, config, gpu="600MiB"))
    assert verdict == "### It does not fit: 0.6 of 0.6 GiB"
    assert "Settings that fit, if there are any: hf-memopt plan --model config.json" in text


@pytest.mark.usefixtures("in_this_process")
def test_a_plan_is_a_table_and_a_command(app: ModuleType, config: str) -> None:
    verdict, text, drawn, command = app.plan(*form(app, config, passes=2))
    assert verdict == "### Settings, the fastest that fit first"
    assert "micro-batch" in text
    assert drawn == ""
    assert command.startswith("hf-memopt plan --model=config.json --gpu=1GiB")
    assert "--effective-batch=4" in command


@pytest.mark.parametrize("model", ["--recipe=train_lgt", "--json=/tmp/x", "../../etc", "; rm -rf /", ""])
@pytest.mark.usefixtures("in_this_process")
def test_no_model_is_anything_but_a_model(app: ModuleType, model: str) -> None:
    for ask in (app.estimate, app.plan):
        verdict, text, _, _ = ask(*form(app, model=model))
        assert verdict == app.NO_ANSWER
        assert f"model={model!r}" in text or "name a" in text
        assert len(text.splitlines()) == 1


@pytest.mark.usefixtures("in_this_process")
def test_a_bad_value_is_told_in_a_line(app: ModuleType, config: str) -> None:
    verdict, text, _, _ = app.estimate(*form(app, config, gpu="--check"))
    assert (verdict, len(text.splitlines())) == (app.NO_ANSWER, 1)
    assert "gpu='--check' is neither a size" in text


def test_an_answer_that_takes_too_long_is_given_up(
    app: ModuleType, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LIMIT_S", 0.01)
    verdict, text, _, command = app.estimate(*form(app, config))
    assert verdict == app.NO_ANSWER
    assert text == "No answer within 0.01 s. Run the command below on your own machine."
    assert command.startswith("hf-memopt estimate")


@pytest.fixture
def address() -> Iterator[str]:
    """Serve the page in a process of its own."""
    server = subprocess.Popen(
        [sys.executable, "-u", str(FILE)], stdout=subprocess.PIPE, text=True, env=os.environ | {"NO_PROXY": "*"}
    )
    yield next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
    server.terminate()
    server.communicate()


@pytest.mark.e2e
def test_the_page_asks_what_its_fields_say(app: ModuleType, address: str, config: str) -> None:
    with httpx.Client(base_url=f"{address}/gradio_api", timeout=120, trust_env=False) as page:
        with open(config, "rb") as opened:
            (uploaded,) = page.post("/upload", files={"files": opened}).json()
        values = form(app, gpu="8GiB")
        values[1] = {"path": uploaded, "meta": {"_type": "gradio.FileData"}}
        event = page.post("/call/estimate", json={"data": values}).json()["event_id"]
        said = page.get(f"/call/estimate/{event}").text
    assert "event: complete" in said
    verdict, text, _, command = json.loads(said.rpartition("data: ")[2])
    assert verdict.startswith("### It fits")
    assert text.startswith("config.json as LlamaForCausalLM")
    assert command.endswith("-- config.json")


@pytest.mark.slow
def test_in_a_browser(address: str, config: str) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        driver.implicitly_wait(120)
        driver.get(address)
        driver.find_element("css selector", "input[type=file]").send_keys(config)
        assert driver.find_element("xpath", "//a[@download='uploaded.json']")  # the upload is over
        driver.find_element("xpath", "//button[normalize-space()='Does it fit?']").click()
        assert driver.find_element("xpath", "//h3[contains(., 'It fits')]")
        assert driver.find_element("css selector", "iframe[srcdoc]").is_displayed()
    finally:
        driver.quit()
