"""A page that asks `hf-memopt estimate` and `hf-memopt plan`: does my training fit, and with which settings?

    python space/app.py        # then open http://127.0.0.1:7860

It needs `pip install ".[app]"`, no GPU and no weights. Each question is one run of a command, which the page shows.
"""

import functools
import html
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.job import CHOICES, FIELDS

LINE = [sys.executable, "-m", "hf_memopt.cli"]
LIMIT_S = 600
LIMIT_BYTES = 8 * 2**30
# Questions that wait for their turn; later visitors are told to come back.
MAX_WAITING = 20
EVERY_S = 1.0
ADAPTERS = {"all weights": "none", "LoRA": "none", "LoRA on 8 bits": "int8-llm", "QLoRA (NF4)": "nf4"}
HUB, FILE = "hub id", "config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
TITLE = "Does my training fit?"
EXPLANATION = f"""# {TITLE}
Whole training steps of a transformers model, run on tensors without memory by CUDA's rules. No weight is downloaded and
no GPU is used; the configuration is enough. An estimate takes 10 to 60 seconds, a search for settings up to minutes."""
ASK, SEARCH = "Does it fit?", "Find settings that fit"
FIRST = f"Press “{ASK}” for the verdict, “{SEARCH}” for the fastest settings."
NO_ANSWER, STOPPED, WORKING = "### No answer", "### Stopped", "### Working"
# Left to the trainer, whose settings have other defaults for each kind of model.
DEFAULT = "default"
# Flags that `estimate` and `plan` share. `quantize` follows from "what learns"; the number of GPUs is not asked for.
SHARED = ("task", "dtype", "precision", "attention", "loss", "optimizer")
ACTIVATIONS = ("checkpointing", "offload")
SETTINGS = """### Settings, the fastest that fit first
The command below writes the files that the run needs."""
# A table's columns stand at least two spaces apart.
TABLE = re.compile(r"\S {2,}\S")
FLAG = re.compile(r"(?<=\s)--?[a-z]\S*")
CSS = """
#said p, #command code {overflow-wrap: break-word}
#said span, #command span {display: inline-block; max-width: 100%}
#said p {margin: 0 0 .6rem; white-space: pre-line}
#said pre {overflow-x: auto; white-space: pre; font-size: .8rem; margin: 0 0 .8rem; padding: .6rem;
  border: 1px solid var(--border-color-primary); border-radius: 6px; background: var(--background-fill-secondary)}
#command code {display: block; padding: .6rem; border: 1px solid var(--border-color-primary); border-radius: 6px}
@media (max-width: 40rem) {#said pre {font-size: .68rem}}
"""
COPY = "() => navigator.clipboard.writeText(document.querySelector('#command code').textContent)"
# Verdict, text, command, drawing; the last three are HTML.
Answer = tuple[str, str, str, str]
# The last words of a command, and whether it failed.
Reply = tuple[str, bool]


def answered(ask: Callable[..., Iterator[Answer]]) -> Callable[..., Iterator[Answer]]:
    """Return a question whose ValueError is its answer."""

    @functools.wraps(ask)
    def answers(*form: Any) -> Iterator[Answer]:
        try:
            yield from ask(*form)
        except ValueError as error:
            yield NO_ANSWER, text_html(str(error)), "", ""

    return answers


def whole(number: float | None) -> int:
    if number is None:
        raise ValueError("A number is missing; fill all fields.")
    return int(number)


def words_of(gpu: str, seq_len: float, learns: str, rank: float, *choices: str) -> list[str]:
    """Return the flags that `estimate` and `plan` share, without those that are left to the trainer."""
    # Joined by "=", so that whatever is written into a field stays that field's value.
    words = [f"--gpu={gpu}", f"--seq-len={whole(seq_len)}"]
    if learns != "all weights":
        words += [f"--lora-rank={whole(rank)}"]
    if ADAPTERS[learns] != "none":
        words += [f"--quantize={ADAPTERS[learns]}"]
    return words + flags_of(SHARED, choices)


def flags_of(names: Sequence[str], choices: Sequence[str]) -> list[str]:
    return [f"--{name}={value}" for name, value in zip(names, choices, strict=True) if value != DEFAULT]


@answered
def estimate(
    source: str, model: str, config: str | None, batch: float, passes: float, kept: str, offload: str, *form: Any
) -> Iterator[Answer]:
    """Yield answers, the last of which has verdict, text, command and timeline."""
    step = [f"--batch-size={whole(batch)}", f"--accumulation={whole(passes)}"]
    flags = [*words_of(*form), *step, *flags_of(ACTIVATIONS, (kept, offload))]
    words = ["estimate", *flags, "--", name_of(source, model, config)]
    with place_for(source, config) as folder:
        text, failed = yield from run(words, folder, "--json=estimate.json", "--timeline=timeline.html")
        if failed:
            yield NO_ANSWER, text_html(text), command_html(words), ""
            return
        found = json.loads((folder / "estimate.json").read_text())
        drawn = html.escape((folder / "timeline.html").read_text())
    name, _, rest = text.replace("timeline: timeline.html\n", "").partition("\n\n")
    needed, room = found["needed_bytes"] / 2**30, found["card"]["memory_bytes"] / 2**30
    fits = needed <= room
    verdict = f"### {'It fits' if fits else 'It does not fit'}: {needed:.1f} of {room:.1f} GiB\n{name}"
    if not fits:
        verdict += f"\n\nNext: press “{SEARCH}”."
    yield verdict, text_html(rest), command_html(words), frame_html(drawn)


@answered
def plan(
    source: str, model: str, config: str | None, batch: float, passes: float, kept: str, offload: str, *form: Any
) -> Iterator[Answer]:
    """Yield answers, the last of which has no drawing. Checkpointing and offloading are what is searched for."""
    words = [
        "plan",
        f"--model={name_of(source, model, config)}",
        *words_of(*form),
        f"--effective-batch={whole(batch) * whole(passes)}",
        "--explain",
    ]
    with place_for(source, config) as folder:
        text, failed = yield from run(words, folder)
    yield NO_ANSWER if failed else SETTINGS, text_html(text), command_html(words), ""


def name_of(source: str, model: str, config: str | None) -> str:
    """Return the model's id on the hub, which is no path of the host, or the name of the file that was uploaded."""
    if source == FILE:
        if not config:
            raise ValueError(f"Upload the model's config.json, or choose “{HUB}”.")
        return "config.json"
    if not HUB_ID.fullmatch(model.strip()):
        raise ValueError(f"model={model!r} is no hub id such as Qwen/Qwen3-8B; name one, or upload a config.json")
    return model.strip()


@contextmanager
def place_for(source: str, config: str | None) -> Iterator[Path]:
    """Yield a folder of the question's own, with the config.json that was uploaded for it."""
    with tempfile.TemporaryDirectory() as folder:
        if source == FILE and config:
            shutil.copy(config, Path(folder, "config.json"))
        yield Path(folder)


def run(words: list[str], folder: Path, *unseen: str) -> Generator[Answer, None, Reply]:
    """Run a command in a folder, yield its progress, and return its last words; closed early, stop the command.

    The page does not show the flags `unseen`.
    """
    line = [*LINE, words[0], *unseen, *words[1:]]
    said, complained = folder / "stdout.txt", folder / "stderr.txt"
    started = time.monotonic()
    with said.open("w") as stdout, complained.open("w") as stderr:
        running = subprocess.Popen(
            line, cwd=folder, env=environment(), stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            if hasattr(resource, "prlimit"):  # Linux
                with suppress(ProcessLookupError):
                    resource.prlimit(running.pid, resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
            while running.poll() is None:
                seconds = time.monotonic() - started
                if seconds > LIMIT_S:
                    return f"No answer within {LIMIT_S} s. Run the command below on your own machine.", True
                yield f"{WORKING}: {seconds:.0f} s", text_html(last_line(complained)), command_html(words), ""
                with suppress(subprocess.TimeoutExpired):
                    running.wait(EVERY_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # and the processes that it has started
            running.wait()
    failed = running.returncode != 0
    return (complained if failed else said).read_text(), failed


def environment() -> dict[str, str]:
    """Return the host's environment without its account on the hub, whose private models are none of a visitor's."""
    kept = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    return kept | {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def last_line(file: Path) -> str:
    """Return the newest count of a progress bar, without its rate, or a sentence where there is none."""
    lines = [line.strip() for line in re.split(r"[\r\n]", file.read_text()) if line.strip()]
    return lines[-1].partition(" [")[0] if lines else "Reading the configuration and running the steps."


def text_html(text: str) -> str:
    """Return a command's words with paragraphs that wrap, but for flags, and tables that scroll."""
    blocks = filter(None, (html.escape(block.strip("\n")) for block in text.split("\n\n")))
    return "".join(
        f"<pre>{block}</pre>" if TABLE.search(block) else f"<p>{FLAG.sub(r'<span>\g<0></span>', block)}</p>"
        for block in blocks
    )


def command_html(words: list[str]) -> str:
    """Return a command of `hf-memopt` that wraps between its words alone."""
    spans = (f"<span>{html.escape(shlex.quote(word))}</span>" for word in ("hf-memopt", *words))
    return f"<code>{' '.join(spans)}</code>"


def frame_html(page: str) -> str:
    """Return a page, escaped already, in a frame as high as it is."""
    fit = "this.style.height = this.contentDocument.documentElement.scrollHeight + 'px'"
    return f'<iframe srcdoc="{page}" onload="{fit}" style="width: 100%; height: 900px; border: 0"></iframe>'


def choice(name: str) -> gr.Dropdown:
    return gr.Dropdown([DEFAULT, *CHOICES[name]], value=DEFAULT, label=name, info=FIELDS[name].options["help"])


def shown_source(source: str) -> tuple[Any, Any]:
    return gr.update(visible=source == HUB), gr.update(visible=source == FILE)


def buttons(running: bool) -> tuple[Any, Any, Any]:
    """Return the states of the two questions and of the button that stops them."""
    return gr.update(interactive=not running), gr.update(interactive=not running), gr.update(visible=running)


def make_app() -> gr.Blocks:
    with gr.Blocks(title=TITLE) as app:
        gr.Markdown(EXPLANATION)
        with gr.Row():
            with gr.Column(scale=1):
                source = gr.Radio([HUB, FILE], value=HUB, label="model")
                model = gr.Textbox("Qwen/Qwen3-8B", label="hub id")
                config = gr.File(
                    label="its config.json", file_types=[".json"], type="filepath", height=180, visible=False
                )
                gpu = gr.Dropdown(
                    list(CARDS), value="rtx4090", label="card", info="or a size, such as 12GiB", allow_custom_value=True
                )
                learns = gr.Radio(list(ADAPTERS), value="QLoRA (NF4)", label="what learns")
                rank = gr.Slider(1, 256, value=16, step=1, label="rank of the adapters")
                seq_len = gr.Number(4096, label="tokens per sample", precision=0, minimum=1)
                batch = gr.Number(1, label="samples per forward pass", precision=0, minimum=1)
                passes = gr.Number(1, label="forward passes per update", precision=0, minimum=1)
                activations = [choice(name) for name in ACTIVATIONS]
                with gr.Accordion("Weights, precision, optimizer", open=False):
                    shared = [choice(name) for name in SHARED]
            with gr.Column(scale=2):
                with gr.Row():
                    ask = gr.Button(ASK, variant="primary")
                    search = gr.Button(SEARCH)
                    stop = gr.Button("Stop", variant="stop", visible=False)
                verdict = gr.Markdown(FIRST)
                said = gr.HTML(elem_id="said")
                used = gr.HTML(elem_id="command")
                copy = gr.Button("Copy the command", size="sm", visible=False)
                drawn = gr.HTML()
        unseen: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        one_at_a_time: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "command"}
        source.change(shown_source, source, [model, config], **unseen)
        learns.change(lambda chosen: gr.update(visible=chosen != "all weights"), learns, rank, **unseen)
        inputs = [source, model, config, batch, passes, *activations, gpu, seq_len, learns, rank, *shared]
        outputs = [verdict, said, used, drawn]
        states = [ask, search, stop]
        running = []
        for button, answer, name in ((ask, estimate, "estimate"), (search, plan, "plan")):
            began = button.click(lambda: buttons(running=True), None, states, **unseen)
            asked = began.then(answer, inputs, outputs, api_name=name, show_progress="hidden", **one_at_a_time)
            asked.then(lambda: buttons(running=False), None, states, **unseen)
            running.append(asked)
        stopped = stop.click(lambda: (STOPPED, ""), None, [verdict, said], cancels=running, **unseen)
        stopped.then(lambda: buttons(running=False), None, states, **unseen)
        used.change(lambda: gr.update(visible=True), None, copy, **unseen)
        copy.click(None, js=COPY)
    return app


if __name__ == "__main__":
    make_app().queue(max_size=MAX_WAITING).launch(css=CSS, max_file_size="1mb")
