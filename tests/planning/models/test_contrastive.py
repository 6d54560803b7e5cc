"""Contrastive training of embedding models: the loss of sentence-transformers, in one pass or in cached parts."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from transformers_toys import TOKENS, VOCABULARY, FolderOf, workload_of

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.models.model_batches import Sample
from hf_memopt.planning.simulation.child_process import run_isolated

model_levers = LateModule("hf_memopt.planning.workloads.model_levers")
contrastive = LateModule("hf_memopt.planning.models.contrastive")
losses = LateModule("sentence_transformers.sentence_transformer.losses")
sentences = LateModule("sentence_toys")
tasks = LateModule("hf_memopt.planning.models.tasks")
transformers = LateModule("transformers")

ENCODER, DECODER = "bert", "qwen3"


def real_model(model_type: str, folder_of: FolderOf) -> tuple[Any, Any]:
    config = transformers.AutoConfig.from_pretrained(folder_of(model_type))
    torch.manual_seed(0)
    return tasks.TASKS["contrastive"].build(config, model_type).double().eval(), config


def random_texts(config: Any, num_samples: int, passages: int) -> dict[str, Any]:
    batch = contrastive.column_batch(config, num_samples, Sample(8, passages=passages))
    generator = torch.Generator().manual_seed(1)
    return {**batch, "input_ids": torch.randint(VOCABULARY, batch["input_ids"].shape, generator=generator)}


@pytest.mark.parametrize("passages", [1, 3])
@pytest.mark.parametrize("model_type", [ENCODER, DECODER])
def test_the_loss_is_that_of_sentence_transformers(model_type: str, passages: int, folder_of: FolderOf) -> None:
    model, config = real_model(model_type, folder_of)
    batch = random_texts(config, 4, passages)
    states = model(input_ids=batch["input_ids"]).last_hidden_state
    embeddings = states.mean(1) if model_type == ENCODER else states[:, -1]
    theirs = losses.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings(list(embeddings.split(4)), None)
    torch.testing.assert_close(contrastive.ranking_loss(model, batch), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", [ENCODER, DECODER])
def test_parts_have_the_gradient_of_the_whole(model_type: str, folder_of: FolderOf) -> None:
    """The two parts of each column are the same here, as in a simulation."""
    model, config = real_model(model_type, folder_of)
    part = random_texts(config, 4, 2)
    columns = part["input_ids"].split(4)
    whole = {"input_ids": torch.cat([column for column in columns for _ in range(2)]), "labels": torch.zeros(8)}
    contrastive.ranking_loss(model, whole).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    contrastive.cached_ranking_loss(model, part, num_passes=2, num_simulated=2).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-7)


def workload(folder: str, **options: Any) -> Any:
    return workload_of(folder, **{"seq_len": TOKENS, "batch_size": 8, "effective_batch": 32, **options})


def estimated(folder: str, micro_batch: int, checkpointing: str = "none", **options: Any) -> MemoryEstimate:
    step = workload(
        folder, task="contrastive", batch_size=micro_batch, checkpointing=checkpointing, **options
    ).as_given()
    return run_isolated(lambda: simulate_step(step))


def test_an_encoder_without_a_head_is_an_embedding_model(folder_of: FolderOf) -> None:
    bare = folder_of(ENCODER, architectures=["BertModel"])
    assert workload(bare, passages=2, batch_size=32).name == (
        f"{bare} as BertModel in float32 on a query and 2 passages of {TOKENS} tokens each, embedded by the mean of "
        "the states"
    )
    assert workload(bare, passages=2).tokens_per_sample == 3 * TOKENS
    assert workload(folder_of(DECODER)).given.options.kind == "causal"
    assert workload(folder_of(DECODER), task="contrastive").name.endswith("embedded by the last token's state")


@pytest.mark.parametrize(("model_type", "options"), [(ENCODER, {}), (DECODER, {"lora_rank": 2, "padding": True})])
@pytest.mark.sweep(share=0.5)
def test_every_weight_learns(model_type: str, options: dict[str, Any], folder_of: FolderOf) -> None:
    found = estimated(folder_of(model_type), 32, **options)
    assert found.unreached == ()
    assert found.breakdown["parameters"] > 0


def test_a_gradient_cache_holds_the_activations_of_a_part(folder_of: FolderOf) -> None:
    """Each of two columns runs alone, so that parts of 8 of 32 texts hold an eighth."""
    folder = folder_of(ENCODER)
    whole, parts = estimated(folder, 32), estimated(folder, 8, gradient_cache=True)
    assert parts.breakdown["parameters"] == whole.breakdown["parameters"]
    beside = ("activations", "temporaries")
    held, of_part = (sum(each.breakdown.get(kind, 0) for kind in beside) for each in (whole, parts))
    assert of_part < held / 4


def test_only_a_gradient_cache_may_divide_an_update(folder_of: FolderOf) -> None:
    folder = folder_of(ENCODER)
    assert workload(folder, task="contrastive").micro_batches == [32]
    cached = workload(folder, task="contrastive", gradient_cache=True)
    assert cached.micro_batches == [1, 2, 4, 8, 16, 32]
    assert {model_levers.ACTIVATIONS[name][1] for name in cached.levers[0].values} == {"off"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_cache": True}, "gradient_cache=True means nothing to task='masked'; leave it out"),
        ({"passages": 2}, "passages=2 means nothing to task='masked'; leave it out"),
        ({"task": "contrastive", "loss": "chunked"}, "loss='chunked' is for task='causal'"),
        (
            {"task": "contrastive", "gradient_cache": True, "num_gpus": 2},
            "gradient_cache=True with num_gpus=2 and engine='ddp' is not simulated; use one GPU",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str, folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        workload(folder_of(ENCODER), **options)


def test_passes_that_run_again_are_not_offloaded(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="offload='all' with gradient_cache=True: passes run again in backward"):
        workload(folder_of(ENCODER), task="contrastive", gradient_cache=True, offload="all")


@pytest.mark.e2e
@pytest.mark.parametrize("options", [{"lora_rank": 2}, {"gradient_cache": True, "passages": 2}])
@pytest.mark.slow
def test_the_command_of_a_plan_trains(options: dict[str, Any], tmp_path: Path) -> None:
    sentences.make_model(tmp_path, 0.0)
    chosen = workload(str(tmp_path / "bert"), task="contrastive", effective_batch=8, **options)
    settings = {name: choice.values[0] for name, choice in ((each.name, each) for each in chosen.levers)}
    command = chosen.command(chosen.write(settings, 4 if options.get("gradient_cache") else 8, tmp_path))
    script = shlex.split(command)[shlex.split(command).index("--") + 1 :]
    flags = [*script, "--output_dir", str(tmp_path / "run"), "--use_cpu", "True", "--max_steps", "2"]
    done = subprocess.run([sys.executable, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train_runtime" in done.stdout
    assert (tmp_path / "run" / "config_sentence_transformers.json").exists()
