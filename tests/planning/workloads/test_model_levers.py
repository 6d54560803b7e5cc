"""The levers of a transformers model, and the options that each of their values changes."""

from pathlib import Path
from typing import Any

import pytest
from transformers_toys import workload_of

ALL = "optimizer,loss,base,precision,quantize"
LORA = {"lora_rank": 4}


def workload(folder: Path, **given: Any) -> Any:
    usual = {"precision": "no", "dtype": "float32", "checkpointing": "none"}
    return workload_of(str(folder), seq_len=32, batch_size=4, **{**usual, **given})


def test_levers_that_change_no_bit_are_varied_unless_others_are_named(qwen3: Path) -> None:
    assert [lever.name for lever in workload(qwen3).levers] == ["activations", "optimizer"]
    assert workload(qwen3).levers[1].values == (
        *("adamw", "adamw, state on host", "adamw, state in a file"),
        *("adamw, weights and gradients on host", "adamw, weights and gradients in files"),
    )
    assert [lever.name for lever in workload(qwen3, **LORA).levers] == ["activations", "base"]
    assert [lever.name for lever in workload(qwen3, **LORA, vary="loss").levers] == ["activations"]
    assert [lever.name for lever in workload(qwen3, vary="precision").levers] == ["activations", "precision"]
    assert [lever.name for lever in workload(qwen3, vary="base").levers] == ["activations"]


def test_a_name_that_is_no_lever_is_refused(qwen3: Path) -> None:
    with pytest.raises(ValueError, match=r"vary='loss,lr': 'lr' is not a lever; choose from optimizer, loss, base"):
        workload(qwen3, vary="loss,lr")


@pytest.mark.parametrize(
    "given", [{}, LORA, {"num_gpus": 2, "engine": "zero3", "precision": "bf16"}, {"dtype": "bfloat16"}]
)
def test_the_first_value_of_each_lever_changes_nothing(qwen3: Path, given: dict[str, Any]) -> None:
    model = workload(qwen3, **given, vary=ALL)
    plain = {lever.name: lever.values[0] for lever in model.levers}
    changed = model.chosen(plain, 4).options
    names = ("optimizer", "loss", "dtype", "precision", "quantize", "engine", "optimizer_on", "home")
    assert all(getattr(changed, name) == getattr(model.given.options, name) for name in names)


def test_each_value_is_possible_alone_or_says_why_not(qwen3: Path) -> None:
    model = workload(qwen3, **LORA, vary=ALL)
    plain = {lever.name: lever.values[0] for lever in model.levers}
    reasons = {}
    for lever in model.levers:
        for value in lever.values:
            try:
                model.simulated({**plain, lever.name: value}, 1)
            except ValueError as error:
                reasons[lever.name, value] = str(error)
    assert reasons == {}


def test_the_state_has_a_home_of_its_own_or_that_of_an_engine(qwen3: Path) -> None:
    model = workload(qwen3, vary="optimizer")
    homes = [("adamw, state on host", "host"), ("adamw, state in a file", "file")]
    for name, home in homes:
        changed = model.chosen({"activations": "on the device", "optimizer": name}, 4).options
        assert (changed.engine, changed.optimizer_home, changed.max_grad_norm) == ("ddp", home, 1.0)
    given = workload(qwen3, vary="optimizer", optimizer_home="host").levers[1]
    assert given.values == ("adamw", "adamw-8bit", "paged-adamw-8bit", "adamw-4bit")
    sharded = model.chosen(
        {"activations": "on the device", "optimizer": "adamw and weights on host (fsdp2)"}, 4
    ).options
    assert (sharded.engine, sharded.optimizer_on, sharded.num_gpus) == ("fsdp2", "host", 1)


def test_weights_that_train_have_a_home_where_all_of_them_do(qwen3: Path) -> None:
    model = workload(qwen3, vary="optimizer")
    for name, home in (("on host", "host"), ("in files", "file")):
        changed = model.chosen(
            {"activations": "on the device", "optimizer": f"adamw, weights and gradients {name}"}, 4
        ).options
        assert (changed.base, changed.trained, changed.home_of_state) == (home, True, home)
    values = {lever.name: lever.values for lever in workload(qwen3, **LORA, vary="optimizer").levers}["optimizer"]
    assert "adamw, weights and gradients on host" not in values
    given = workload(qwen3, base="file", trained=True, optimizer_home="host", vary=ALL)
    assert given.given.options.home_of_state == "host"
    assert {lever.name: lever.values for lever in given.levers}["base"] == ("file",)


def test_zero_trains_16_bits_in_that_precision(qwen3: Path) -> None:
    model = workload(qwen3, vary="optimizer", dtype="bfloat16")
    zero = model.chosen({"activations": "on the device", "optimizer": "adamw on host (zero2)"}, 4).options
    assert (zero.dtype, zero.precision) == ("bfloat16", "bf16")


def test_disks_are_read_where_there_is_one(qwen3: Path) -> None:
    of_disk = {
        lever.name: lever.of_disk
        for model in (workload(qwen3, **LORA, vary="base"), workload(qwen3, vary="optimizer"))
        for lever in model.levers
    }
    assert of_disk["base"] == ("file",)
    assert of_disk["optimizer"] == (
        "adamw, state in a file",
        "adamw, weights and gradients in files",
        "adamw on nvme, weights on host (zero3)",
    )


def test_an_engine_moves_no_weights_that_stream(qwen3: Path) -> None:
    by_base, alone = (
        {lever.name: lever.values for lever in workload(qwen3, **LORA, vary=vary).levers}["optimizer"]
        for vary in ("base,optimizer", "optimizer")
    )
    assert by_base == ("adamw", "adamw-8bit", "paged-adamw-8bit", "adamw-4bit")
    assert "adamw and weights on host (fsdp2)" in alone
