"""Tests of the default weights of micro-batches, with which the parts give the whole batch's gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt.training import MicroBatcher, train_step
from hf_memopt.training.window import default_weight

transformers = LateModule("transformers")

TOLERANCE = 1e-6  # transformers computes losses of language models in float32; a wrong weight gives 1e-2
SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LENGTHS = (7, 2, 5, 3)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def sentences() -> dict[str, Tensor]:
    """Return rows of several lengths; the first half has no loss on its first three labels, as on a prompt."""
    tokens = torch.randint(16, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    labels = tokens.masked_fill(~mask, -100)
    labels[0, :3] = -100
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def causal_lm() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, max_position_embeddings=8))


def token_classifier() -> Any:
    return transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, num_labels=16))


def encoder_decoder() -> Any:
    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def sequence_classifier() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=16))


def gradients_of_a_step(model: nn.Module, step: Any) -> list[Tensor]:
    accelerator = Accelerator(cpu=True)
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *event: found.extend(each.grad.clone() for each in model.parameters() if each.grad is not None)
    )
    step(accelerator, *accelerator.prepare(model, optimizer))
    return found


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize("make_model", [causal_lm, token_classifier, encoder_decoder, sequence_classifier])
@pytest.mark.parametrize("how", ["train_step", "MicroBatcher"])
def test_parts_of_several_lengths_have_the_gradient_of_the_whole(make_model: Any, how: str) -> None:
    """Compare transformers' own losses in micro-batches of 3 and 1 rows."""
    torch.manual_seed(0)
    model = make_model().double().eval()
    batch = sentences()
    if make_model is sequence_classifier:
        batch["labels"] = torch.arange(4)
    loss_fn(model, batch).backward()
    want = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()

    def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        if how == "MicroBatcher":
            MicroBatcher(accelerator, 3).train_step(model, loss_fn, batch, optimizer)
        else:
            parts = [{name: values[rows] for name, values in batch.items()} for rows in (slice(3), slice(3, 4))]
            train_step(accelerator, model, loss_fn, parts, optimizer)

    got = gradients_of_a_step(model, step)
    assert len(got) == len(want)
    assert max((a - b).abs().max().item() for a, b in zip(got, want, strict=True)) <= TOLERANCE


@pytest.mark.parametrize(
    ("micro_batch", "weight"),
    [
        (torch.zeros(5, 2), 5),
        ({"x": torch.zeros(5, 2), "y": torch.zeros(5)}, 5),
        ({"x": torch.zeros(5, 2), "labels": torch.zeros(5)}, 5),  # labels of a regression
        ({"pixels": torch.zeros(9, 2), "labels": torch.tensor([[1, -100], [2, 3]])}, 3),
        ({"labels": torch.zeros(2, 3).long(), "shift_labels": torch.tensor([[1, 2, -100], [-100, 3, -100]])}, 3),
    ],
)
def test_labels_count_and_else_samples(micro_batch: Any, weight: int) -> None:
    assert float(default_weight(nn.Linear(1, 1))(micro_batch)) == weight


def test_a_batch_that_cannot_be_counted_is_refused() -> None:
    def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        train_step(accelerator, model, lambda model, batch: model.weight.sum(), [{"text": "x"}], optimizer)

    with pytest.raises(ValueError, match=r"micro-batch 1: batch: .* without samples; .* give a weight_fn"):
        gradients_of_a_step(nn.Linear(1, 1), step)
