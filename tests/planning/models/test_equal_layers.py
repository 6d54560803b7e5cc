from typing import Any

import pytest
from late_imports import LateModule
from torch import nn

from hf_memopt.planning.accounting.repeated_layers import Layers
from hf_memopt.planning.simulated_step import SimulatedStep

transformers = LateModule("transformers")
found = LateModule("hf_memopt.planning.models.equal_layers")


def model(*layers: nn.Module, **others: nn.Module) -> nn.Module:
    body = nn.Module()
    body.layers = nn.ModuleList(layers)
    whole = nn.Module()
    whole.body = body
    for name, other in others.items():
        setattr(whole, name, other)
    return whole


def linear(width: int = 4, **settings: Any) -> nn.Module:
    layer = nn.Linear(4, width)
    for name, value in settings.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("layers", "period"),
    [
        ([linear(layer_idx=number) for number in range(6)], 1),
        ([linear(8), *(linear() for _ in range(5))], 1),
        ([linear(4 + number % 3) for number in range(9)], 3),
        ([linear(window=number % 2) for number in range(6)], 2),
    ],
    ids=["their numbers differ", "the first differs", "every third is alike", "a setting alternates"],
)
def test_equal_layers_are_found(layers: list[nn.Module], period: int) -> None:
    assert found.equal_layers(model(*layers)) == Layers("body.layers", len(layers), period)


@pytest.mark.parametrize(
    "whole",
    [
        model(*(linear() for _ in range(5)), linear(8)),
        model(*(linear(window=number) for number in range(6))),
        model(*(linear() for _ in range(6)), decoder=nn.ModuleList(linear() for _ in range(6))),
        nn.Linear(4, 4),
    ],
    ids=["the last differs", "a setting differs in each", "two lists", "no list"],
)
def test_others_are_simulated_whole(whole: nn.Module) -> None:
    assert found.equal_layers(whole) is None


def test_lists_within_layers_do_not_count() -> None:
    experts = [nn.ModuleDict({"experts": nn.ModuleList(linear() for _ in range(9))}) for _ in range(4)]
    assert found.equal_layers(model(*experts)) == Layers("body.layers", 4)


def test_shorter_configurations_keep_everything_else() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=6, layer_types=["full_attention"] * 6, hidden_size=32)
    shorter = found.with_num_layers(config, Layers("model.layers", 6), 4)
    assert (shorter.num_hidden_layers, len(shorter.layer_types), shorter.hidden_size) == (4, 4, 32)
    assert (config.num_hidden_layers, len(config.layer_types)) == (6, 6)


def test_a_shorter_configuration_has_fewer_layers_of_text() -> None:
    text = transformers.Llama4TextConfig(num_hidden_layers=6).to_dict()
    shorter = found.with_num_layers(transformers.Llama4Config(text_config=text), Layers("model.layers", 6), 4)
    assert (shorter.text_config.num_hidden_layers, len(shorter.text_config.layer_types)) == (4, 4)


@pytest.mark.parametrize("layers", [None, Layers("model.layers", 6)])
def test_a_step_is_told_by_few_layers_where_they_are_equal(layers: Layers | None) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=6, hidden_size=32)
    made: list[int] = []

    def step_of(config: Any, repeated: Any) -> SimulatedStep:
        made.append(config.num_hidden_layers)
        return SimulatedStep(setup=lambda device: None, step=lambda state: None, repeated=repeated)

    repeated = found.told_by_few(step_of, config, layers).repeated
    assert made == [6]
    assert (repeated is None) == (layers is None)
    if repeated is not None:
        assert repeated.layers is layers
        assert repeated.step_with(4).repeated is None
        assert made == [6, 4]
