"""The rule for attention kernels, and torch's own choices on seven generations of CUDA devices."""

import attention_choices
import pytest
import torch

from hf_memopt.planning import estimate_peak_memory
from hf_memopt.planning.simulation.kernels.attention import AttentionCall, choose_kernel

TABLE = attention_choices.read()
CAPABILITIES = sorted(next(iter(TABLE.values())))


def call(case: attention_choices.Case, device: str = "meta") -> AttentionCall:
    positional, named = attention_choices.arguments(case, torch.device(device))
    return AttentionCall(*positional, **named)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_rule_is_torchs_own_choice_in_all_cases(capability: tuple[int, int]) -> None:
    wrong = {
        case: (rule, kernels[capability])
        for case, kernels in TABLE.items()
        if (rule := choose_kernel(call(case), capability)) != kernels[capability]
    }
    assert not wrong


def test_the_table_has_every_case() -> None:
    assert list(TABLE) == list(attention_choices.all_cases())
    assert len(CAPABILITIES) == 7


@pytest.mark.parametrize(
    ("switch", "before", "after"),
    [
        (torch.backends.cuda.enable_cudnn_sdp, "cudnn", "flash"),
        (torch.backends.cuda.enable_flash_sdp, "flash", "efficient"),
        (torch.backends.cuda.enable_mem_efficient_sdp, "efficient", "math"),
    ],
)
def test_what_is_switched_off_is_not_chosen(switch: object, before: str, after: str) -> None:
    case = attention_choices.Case("float32" if before == "efficient" else "bfloat16", 64, False, "plain")
    capability = (9, 0) if before == "cudnn" else (8, 0)
    assert choose_kernel(call(case), capability) == before
    switch(False)
    try:
        assert choose_kernel(call(case), capability) == after
    finally:
        switch(True)


def test_deterministic_algorithms_leave_cudnn_out() -> None:
    case = attention_choices.Case("bfloat16", 64, False, "plain")
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_kernel(call(case), (9, 0)) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_estimate_takes_the_kernels_of_its_card() -> None:
    def setup(device: torch.device) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.zeros(2, 4, 512, 64, dtype=torch.bfloat16, device=device)) for _ in range(3)]

    def step(operands: list[torch.nn.Parameter]) -> None:
        torch.nn.functional.scaled_dot_product_attention(*operands).sum().backward()

    turing, ada = (estimate_peak_memory(setup, step, gpu=name).peak_bytes for name in ("t4", "rtx4070"))
    assert turing - ada > 2 * 4 * 512 * 512 * 2  # the math path keeps all probabilities
