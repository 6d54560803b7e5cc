"""Tests of the calls of DeepSpeed's engine. tests/distributed/test_zero_training.py runs it in two processes."""

import math

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from hf_memopt.training.rank_exchange import apply_by_engine, begin_window, check_engine, engine_of


class Engine:
    def __init__(self, stage: int = 2, clipping: float = 0.0, norm: float | None = 2.0) -> None:
        self._stage, self._clipping, self._norm = stage, clipping, norm
        self.num_updates = 0

    def zero_optimization_stage(self) -> int:
        return self._stage

    def gradient_clipping(self) -> float:
        return self._clipping

    def step(self) -> None:
        self.num_updates += 1

    def get_global_grad_norm(self) -> float | None:
        return self._norm


@pytest.mark.parametrize(
    ("engine", "max_grad_norm", "message"),
    [
        (Engine(stage=0), None, r"zero_optimization.stage=0 does not allow exact steps; use 2 or 3, or DDP"),
        (Engine(stage=1), None, r"zero_optimization.stage=1"),
        (Engine(clipping=1.0), None, r"max_grad_norm=None: .* gradient_clipping=1.0; give both the same value"),
        (Engine(), 0.5, r"max_grad_norm=0.5: .* gradient_clipping=None"),
    ],
)
def test_what_would_be_another_step_is_refused(engine: Engine, max_grad_norm: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine(engine, max_grad_norm)


def test_a_window_has_to_end_before_the_next_one() -> None:
    engine, other = Engine(stage=3, clipping=1.0), Engine()
    check_engine(engine, 1.0)
    begin_window(engine)
    with pytest.raises(ValueError, match=r"the window before this one ended in an error.*from a checkpoint"):
        check_engine(engine, 1.0)
    check_engine(other, None)
    assert apply_by_engine(engine) == 2.0
    assert engine.num_updates == 1
    check_engine(engine, 1.0)


def test_a_norm_that_is_not_computed_is_nan() -> None:
    assert math.isnan(apply_by_engine(Engine(norm=None)))


def test_an_engine_is_there_once_a_model_is_prepared() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    assert engine_of(accelerator) is None
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    accelerator.deepspeed_engine_wrapped = None  # as in an accelerator that has prepared no model
    with pytest.raises(ValueError, match="has prepared no model; pass it through prepare"):
        engine_of(accelerator)
