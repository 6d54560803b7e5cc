"""Tests of the page for a browser, on which each question is one run of a command, with any text in its fields."""

import html
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from tiny_configs import TINY_LLAMA

from hf_memopt.cli import main

FILE = Path(__file__).parents[1] / "space" / "app.py"
TINY = {**TINY_LLAMA, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("space_app", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_this_process(app: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the seconds that a new process takes to import torch."""

    def run(words: list[str], folder: Path, *unseen: str) -> Generator[Any, None, Any]:
        yield app.WORKING, "", app.command_html(words), ""
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            status = main([words[0], *unseen, *words[1:]])
        said = capsys.readouterr()
        return said.err if status else said.out, status != 0

    monkeypatch.setattr(app, "run", run)


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "uploaded.json").write_text(json.dumps(TINY))
    return str(tmp_path / "uploaded.json")


def form(app: ModuleType, config: str | None = None, **changed: Any) -> list[Any]:
    """Return the initial fields with changes."""
    fields = {"source": app.FILE if config else app.HUB, "model": "", "config": config}
    fields |= {"batch": 2, "passes": 1, "checkpointing": "full", "offload": "off"}
    fields |= {"gpu": "1GiB", "seq_len": 16, "learns": "LoRA", "rank": 4}
    fields |= dict.fromkeys(app.SHARED, app.DEFAULT)
    assert changed.keys() <= fields.keys()
    return list((fields | changed).values())


def last(answers: Iterator[tuple[str, str, str, str]]) -> tuple[str, str, str, str]:
    """Return the last answer, with the command as it is copied."""
    verdict, said, used, drawn = list(answers)[-1]
    return verdict, said, as_read(used), drawn


def as_read(page: str) -> str:
    return html.unescape(re.sub("<[^>]+>", "", page))


@pytest.mark.usefixtures("in_this_process")
def test_an_estimate_has_verdict_text_command_and_drawing(app: ModuleType, config: str) -> None:
    verdict, said, command, drawn = last(app.estimate(*form(app, config, gpu="8GiB", dtype="bfloat16")))
    assert verdict == "### It fits: 0.6 of 8.0 GiB\nSFTTrainer of config.json as bfloat16, 16 tokens in each sample"
    assert said.startswith("<p>It fits on 8GiB (8.00 GiB). The step needs ")
    assert "<pre>At the peak, GiB\n" in said
    assert "Confidence: high, nothing had to be assumed</p>" in said
    assert "timeline" not in said
    assert drawn.startswith('<iframe srcdoc="&lt;!DOCTYPE html')
    assert command == (
        "hf-memopt estimate --gpu=8GiB --seq-len=16 --lora-rank=4 --dtype=bfloat16 --batch-size=2 --accumulation=1 "
        "--checkpointing=full --offload=off -- config.json"
    )


@pytest.mark.usefixtures("in_this_process")
def test_what_does_not_fit_is_told_with_the_next_step(app: ModuleType, config: str) -> None:
    verdict, said, _, _ = last(app.estimate(*form(app, config, gpu="600MiB")))
    assert verdict.startswith("### It does not fit: 0.6 of 0.6 GiB\nSFTTrainer of config.json as")
    assert verdict.endswith(f"press “{app.SEARCH}”.")
    assert "Settings that fit, if there are any: hf-memopt plan <span>--model</span> config.json" in said


@pytest.mark.usefixtures("in_this_process")
def test_a_plan_is_a_table_and_a_command(app: ModuleType, config: str) -> None:
    verdict, said, command, drawn = last(app.plan(*form(app, config, passes=2)))
    assert verdict == app.SETTINGS
    assert "<pre>| micro-batch" in said
    assert drawn == ""
    assert command.startswith("hf-memopt plan --model=config.json --gpu=1GiB")
    assert "--effective-batch=4" in command


@pytest.mark.parametrize("model", [
    *("--recipe=train_lgt", "--json=/tmp/x", "; rm -rf /", "", "a/b@main", "gpt2\n--json=x", "x" * 300, "\x1b[31mred"),
    *("../../etc", ".", "..", "/etc/passwd", "~/.bashrc", "a/../b", "a/b/c", "./a", "a//b", "file:///etc", "C:\\x"),
])  # fmt: skip
def test_no_model_is_anything_but_a_model(app: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "run", None)
    for ask in (app.estimate, app.plan):
        verdict, said, used, _ = last(ask(*form(app, model=model)))
        assert verdict == app.NO_ANSWER
        assert f"model={model!r} is no hub id" in as_read(said)
        assert used == ""


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", " a_b/c.d "])
def test_ids_of_the_hub_are_models(app: ModuleType, model: str) -> None:
    assert app.name_of(app.HUB, model, None) == model.strip()


@pytest.mark.usefixtures("in_this_process")
def test_a_bad_value_is_told_in_a_line(app: ModuleType, config: str) -> None:
    verdict, said, _, _ = last(app.estimate(*form(app, config, gpu="--check")))
    assert (verdict, len(said.splitlines())) == (app.NO_ANSWER, 1)
    assert "gpu='--check' is neither a size" in as_read(said)


@pytest.mark.usefixtures("in_this_process")
def test_the_source_that_is_not_chosen_does_not_count(app: ModuleType, config: str) -> None:
    of_hub = form(app, config, source=app.HUB, model="people/none")
    assert last(app.estimate(*of_hub))[2].endswith("-- people/none")
    of_file = form(app, source=app.FILE, model="people/none")
    for ask in (app.estimate, app.plan):
        said = last(ask(*of_file))[1]
        assert as_read(said) == "Upload the model's config.json, or choose “hub id”."


@pytest.mark.parametrize("name", ["batch", "passes", "seq_len", "rank"])
def test_an_empty_field_is_told(app: ModuleType, config: str, name: str) -> None:
    for ask in (app.estimate, app.plan):
        assert last(ask(*form(app, config, **{name: None})))[:2] == (
            app.NO_ANSWER,
            "<p>A number is missing; fill all fields.</p>",
        )


def test_text_becomes_paragraphs_and_tables(app: ModuleType) -> None:
    assert app.text_html("A <b> --seq-len 3\nand on\n\n  MiB  for\n  1.0  x\n") == (
        "<p>A &lt;b&gt; <span>--seq-len</span> 3\nand on</p><pre>  MiB  for\n  1.0  x</pre>"
    )


@pytest.fixture
def command(app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Iterator[Any]]:
    """Return a function that runs lines of Python as the command."""

    def run(program: str) -> Iterator[Any]:
        (tmp_path / "fake.py").write_text(program)
        monkeypatch.setattr(app, "LINE", [sys.executable, str(tmp_path / "fake.py")])
        return app.run(["estimate"], tmp_path)

    return run


def reply_of(running: Iterator[Any]) -> Any:
    """Return the value of a generator, whose steps are passed over."""

    def passed_over() -> Generator[Any, None, None]:
        replies.append((yield from running))

    replies: list[Any] = []
    list(passed_over())
    return replies[0]


def test_progress_is_shown_until_the_command_has_answered(
    app: ModuleType, command: Callable[[str], Iterator[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "EVERY_S", 0.01)
    bar = r"Planning: 1 simulations [00:01]\rPlanning: 2 simulations [00:02]"
    running = command(
        f"import sys, time, pathlib\nprint('{bar}', end='', file=sys.stderr, flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('done')"
    )
    verdict, said, used, _ = next(running)
    assert verdict.startswith(app.WORKING)
    assert used == "<code><span>hf-memopt</span> <span>estimate</span></code>"
    while "Planning" not in said:
        said = next(running)[1]
    assert said == "<p>Planning: 2 simulations</p>"
    (tmp_path / "go").touch()
    assert reply_of(running) == ("done\n", False)


def test_a_command_that_is_given_up_ends(
    app: ModuleType, command: Callable[[str], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        app.subprocess, "Popen", lambda *args, **options: started.append(popen(*args, **options)) or started[-1]
    )
    running = command("import time\ntime.sleep(600)")
    next(running)
    running.close()
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing limits the memory of another process")
def test_a_command_has_little_memory_and_no_account(
    command: Callable[[str], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    text, failed = reply_of(command("import time\ntime.sleep(0.5)\nbytearray(9 * 2**30)"))
    assert failed
    assert "MemoryError" in text
    assert reply_of(command("import os\nprint('secret' in os.environ.values())")) == ("False\n", False)


def test_an_answer_that_takes_too_long_is_given_up(
    app: ModuleType, command: Callable[[str], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LIMIT_S", 0)
    text, failed = reply_of(command("import time\ntime.sleep(600)"))
    assert failed
    assert text == "No answer within 0 s. Run the command below on your own machine."


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
        values[0] = app.FILE
        values[2] = {"path": uploaded, "meta": {"_type": "gradio.FileData"}}
        event = page.post("/call/estimate", json={"data": values}).json()["event_id"]
        said = page.get(f"/call/estimate/{event}").text
    assert "event: complete" in said
    verdict, text, used, _ = json.loads(said.rpartition("data: ")[2])
    assert verdict.startswith("### It fits")
    assert "SFTTrainer of config.json as" in verdict
    assert text.startswith("<p>It fits on 8GiB")
    assert used.endswith("<span>config.json</span></code>")


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
        driver.find_element("css selector", "input[type=radio][value='config.json']").click()
        driver.find_element("css selector", "input[type=file]").send_keys(config)
        assert driver.find_element("xpath", "//a[@download='uploaded.json']")  # the upload is over
        driver.find_element("xpath", "//button[normalize-space()='Does it fit?']").click()
        assert driver.find_element("xpath", "//h3[contains(., 'It fits')]")
        assert driver.find_element("css selector", "iframe[srcdoc]").is_displayed()
    finally:
        driver.quit()
