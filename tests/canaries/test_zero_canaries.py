"""Canaries of offloading and of the simulation of ZeRO in DeepSpeed's sources: an import changes a process for good."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from reliance import relied_on_by

AUTOGRAD_STATE = "hf_memopt/autograd_state.py"
ENGINE = "hf_memopt/planning/simulation/ranks/zero_engine.py"

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def source(path: str) -> str:
    found = find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / path).read_text(encoding="utf-8")


def test_an_object_is_asked_about_the_device() -> None:
    with relied_on_by(ENGINE):
        assert "    if ds_accelerator is not None:\n        return ds_accelerator" in source(
            "accelerator/real_accelerator.py"
        )
        on_hosts = source("accelerator/cpu_accelerator.py")
        for name in (
            "is_synchronized_device",
            "is_fp16_supported",
            "available_memory",
            "device_name",
            "current_device",
            "current_device_name",
            "on_accelerator",
            "Stream",
            "Event",
            "stream",
            "current_stream",
            "default_stream",
        ):
            assert f"    def {name}(self" in on_hosts
        assert "self.shm_comm_op = build_shm_op()" in source("comm/torch.py")


@pytest.mark.parametrize("file", ["stage_1_and_2.py", "stage3.py"])
def test_an_optimizer_asks_for_one_value_and_works_in_these_methods(file: str) -> None:
    with relied_on_by(ENGINE):
        optimizer = source(f"runtime/zero/{file}")
        asking = optimizer[optimizer.index("    def has_overflow(") :]
        assert asking[: asking.index("return bool(overflow)")].count(".item()") == 1
        assert "    def reduce_ready_partitions_and_remove_grads(self, param" in optimizer
        assert "    def independent_gradient_partition_epilogue(self)" in optimizer
        assert "self.averaged_gradients[i] = " in optimizer
        assert "self.ipg_buckets: Dict[" in optimizer
        assert "bucket.buffer" in optimizer


def test_ranks_compare_lists_by_two_functions() -> None:
    with relied_on_by(ENGINE):
        comparing = source("runtime/zero/utils.py")
        comparing = comparing[comparing.index("def assert_ints_same_as_other_ranks") :]
        assert "    assert_lst_len_same_as_other_ranks(ints)\n    rank0_ints = get_lst_from_rank0(ints)" in comparing


def test_weights_are_gathered_for_a_module_and_shares_lie_beside_them() -> None:
    with relied_on_by(ENGINE):
        assert "def fetch_sub_module(self, current_submodule" in source("runtime/zero/partitioned_param_coordinator.py")
        partitioning = source("runtime/zero/partition_parameters.py")
        assert "param.ds_tensor = " in partitioning
        assert "param.ds_persist = " in partitioning


def test_an_optimizer_with_compiled_kernels_is_imported_late() -> None:
    with relied_on_by(ENGINE):
        assert "@compiler.compile()" in source("runtime/zero/muon/original_muon.py")
        for file in ("stage_1_and_2.py", "stage3.py"):
            assert "from deepspeed.runtime.zero.muon.muon_optimizer import" in source(f"runtime/zero/{file}")


def test_a_weight_that_is_gathered_for_each_use_says_so() -> None:
    with relied_on_by(AUTOGRAD_STATE):
        assert "            param.ds_persist = False" in source("runtime/zero/partition_parameters.py")


def test_exact_steps_tell_the_engine_where_a_window_ends() -> None:
    with relied_on_by("hf_memopt/training/rank_exchange.py"):
        engine = source("runtime/engine.py")
        for signature in (
            "backward(self, loss, retain_graph=False, scale_wrt_gas=True)",
            "set_gradient_accumulation_boundary(self, is_boundary)",
            "step(self, ",
            "get_global_grad_norm(self)",
            "zero_optimization_stage(self)",
            "gradient_clipping(self)",
            "fp16_enabled(self)",
        ):
            assert f"    def {signature}" in engine
        assert "loss = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss" in engine
        assert "param.ds_numel = " in source("runtime/zero/partition_parameters.py")
