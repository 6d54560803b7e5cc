"""A page that asks `hf-memopt estimate` and `hf-memopt plan`: does my training fit, and with which settings?

    python space/app.py        # then open http://127.0.0.1:7860

It needs `pip install ".[app]"`, no GPU and no weights. Each question is one run of a command, which the page shows.
"""

import html
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from hf_memopt.estimate.gpus import CARDS
from hf_memopt.jobs.spec import CHOICES, FIELDS

LIMIT_S = 600
ADAPTERS = {"all weights": "none", "LoRA": "none", "LoRA on 8 bits": "int8", "QLoRA (NF4)": "nf4"}
TITLE = "Does my training fit?"
EXPLANATION = f"""# {TITLE}
Whole training steps of a transformers model, run on tensors without memory by CUDA's rules. No weight is downloaded and
no GPU is used; the configuration is enough. An estimate takes 10 to 60 seconds, a search for settings up to minutes."""
NO_ANSWER = "### No answer"
# What is asked most, where it is not the command's own default.
USUAL = {"dtype": "bfloat16", "precision": "bf16", "checkpointing": "full"}
# Verdict, text, drawing, command.
Answer = tuple[str, str, str, str]


def words_of(gpu: str, seq_len: float, learns: str, rank: float, *choices: str) -> list[str]:
    """Return the flags that `estimate` and `plan` share, without those that are as by default."""
    # Joined by "=", so that whatever is written into a field stays that field's value.
    words = [f"--gpu={gpu}", f"--seq-len={int(seq_len)}"]
    if learns != "all weights":
        words += [f"--lora-rank={int(rank)}"]
    if ADAPTERS[learns] != "none":
        words += [f"--quantize={ADAPTERS[learns]}"]
    chosen = zip(SHARED.items(), choices, strict=True)
    return words + [f"--{name}={value}" for (name, (values, _)), value in chosen if value != values[0]]


def estimate(
    model: str, config: str | None, batch: float, passes: float, kept: str, offload: str, *form: Any
) -> Answer:
    """Return verdict, text, timeline and command."""
    step = [f"--batch-size={int(batch)}", f"--accumulation={int(passes)}"]
    words = ["estimate", *words_of(*form), *step, f"--checkpointing={kept}", f"--offload={offload}", "--"]
    words += ["config.json" if config else model.strip()]
    with place_for(config) as folder:
        text, failed = answer_of(["estimate", "--json=estimate.json", "--timeline=timeline.html", *words[1:]], folder)
        if failed:
            return NO_ANSWER, text, "", shlex.join(["hf-memopt", *words])
        found = json.loads((folder / "estimate.json").read_text())
        drawn = html.escape((folder / "timeline.html").read_text())
    needed, room = found["needed_bytes"] / 2**30, found["card"]["memory_bytes"] / 2**30
    verdict = f"### {'It fits' if needed <= room else 'It does not fit'}: {needed:.1f} of {room:.1f} GiB"
    frame = f'<iframe srcdoc="{drawn}" style="width: 100%; height: 900px; border: 0"></iframe>'
    return verdict, text.replace("timeline: timeline.html\n", ""), frame, shlex.join(["hf-memopt", *words])


def plan(model: str, config: str | None, batch: float, passes: float, kept: str, offload: str, *form: Any) -> Answer:
    """Return verdict, table, nothing to draw, and command. Checkpointing and offloading are what is searched for."""
    asked = "config.json" if config else model.strip()
    words = ["plan", f"--model={asked}", *words_of(*form), f"--effective-batch={int(batch * passes)}", "--explain"]
    with place_for(config) as folder:
        text, failed = answer_of(words, folder)
    verdict = NO_ANSWER if failed else "### Settings, the fastest that fit first"
    return verdict, text, "", shlex.join(["hf-memopt", *words])


@contextmanager
def place_for(config: str | None) -> Iterator[Path]:
    """Yield a folder of the question's own, with the config.json that was uploaded for it."""
    with tempfile.TemporaryDirectory() as folder:
        if config:
            shutil.copy(config, Path(folder, "config.json"))
        yield Path(folder)


def answer_of(words: list[str], folder: Path) -> tuple[str, bool]:
    """Run a command of hf-memopt in a folder. Return what it says, and whether it could not answer."""
    line = [sys.executable, "-m", "hf_memopt.cli", *words]
    try:
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"No answer within {LIMIT_S} s. Run the command below on your own machine.", True
    return (done.stderr if done.returncode else done.stdout), done.returncode != 0


def with_texts(*names: str) -> dict[str, tuple[tuple[str, ...], str]]:
    return {name: (CHOICES[name], FIELDS[name].options["help"]) for name in names}


# The form has another field for `quantize`, and asks about one GPU.
SHARED = with_texts("task", "dtype", "precision", "attention", "loss", "optimizer")
ACTIVATIONS = with_texts("checkpointing", "offload")


def choice(name: str, choices: tuple[tuple[str, ...], str]) -> gr.Dropdown:
    values, text = choices
    return gr.Dropdown(list(values), value=USUAL.get(name, values[0]), label=name, info=text)


def make_app() -> gr.Blocks:
    with gr.Blocks(title=TITLE) as app:
        gr.Markdown(EXPLANATION)
        with gr.Row():
            with gr.Column(scale=1):
                model = gr.Textbox("Qwen/Qwen3-8B", label="model", info="hub id; or upload its config.json")
                config = gr.File(label="config.json", file_types=[".json"], type="filepath", height=100)
                gpu = gr.Dropdown(
                    list(CARDS), value="rtx4090", label="card", info="or a size, such as 12GiB", allow_custom_value=True
                )
                learns = gr.Radio(list(ADAPTERS), value="QLoRA (NF4)", label="what learns")
                rank = gr.Slider(1, 256, value=16, step=1, label="rank of the adapters")
                seq_len = gr.Number(4096, label="tokens per sample", precision=0, minimum=1)
                batch = gr.Number(1, label="samples per forward pass", precision=0, minimum=1)
                passes = gr.Number(1, label="forward passes per update", precision=0, minimum=1)
                activations = [choice(name, choices) for name, choices in ACTIVATIONS.items()]
                with gr.Accordion("Weights, precision, optimizer", open=False):
                    shared = [choice(name, choices) for name, choices in SHARED.items()]
            with gr.Column(scale=2):
                with gr.Row():
                    ask = gr.Button("Does it fit?", variant="primary")
                    search = gr.Button("Find settings that fit")
                verdict = gr.Markdown()
                said = gr.Textbox(label="hf-memopt says", lines=12, max_lines=40, elem_id="said")
                used = gr.Textbox(label="the command", buttons=["copy"], elem_id="command")
                drawn = gr.HTML()
        inputs = [model, config, batch, passes, *activations, gpu, seq_len, learns, rank, *shared]
        outputs = [verdict, said, drawn, used]
        ask.click(estimate, inputs, outputs, concurrency_limit=1, api_name="estimate")
        search.click(plan, inputs, outputs, concurrency_limit=1, api_name="plan")
    return app


if __name__ == "__main__":
    make_app().launch(css="#said textarea {font-family: monospace; white-space: pre; overflow-x: auto}")
