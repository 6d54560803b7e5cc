"""Canaries of simulated training steps in torch, transformers and accelerate."""

import inspect
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from late_imports import LateModule
from reliance import relied_on_by
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init as fsdp_init
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.planning.simulation.child_process import TOO_LARGE
from hf_memopt.planning.simulation.kernels import autocast
from hf_memopt.planning.simulation.ranks.first_rank import BACKEND

masking_utils = LateModule("transformers.masking_utils")
transformers_utils = LateModule("transformers.utils.import_utils")

ACCELERATE = "hf_memopt/planning/simulation/patched_accelerate.py"
AUTOCAST = "hf_memopt/planning/simulation/kernels/autocast.py"
ATTENTION = "hf_memopt/planning/simulation/kernels/attention.py"
DEVICE = "hf_memopt/planning/simulation/device.py"
FAKE_MODE = "hf_memopt/planning/simulation/fake_mode.py"
RANKS = "hf_memopt/planning/simulation/ranks/first_rank.py"
UNKNOWNS = "hf_memopt/planning/simulation/data_dependent.py"

# Overloads that Python reaches never or only by names of dimensions, or that call a listed overload. CUDA refuses
# binary_cross_entropy under autocast, which the virtual accelerator runs.
NOT_LISTED = {
    "_cudnn_rnn",
    "binary_cross_entropy",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "cumprod.dimname",
    "cumsum.dimname",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "log_softmax.Dimname",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "norm.names_ScalarOpt_dim",
    "prod.dim_Dimname",
    "softmax.Dimname",
    "sum.dim_DimnameList",
}
# Overloads that on CUDA call the listed convolutions, which then cast.
LISTED_BESIDES = {"conv1d.padding", "conv2d.padding", "conv3d.padding"}


def test_the_autocast_lists_are_those_of_cuda() -> None:
    with relied_on_by(AUTOCAST):
        registrations = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    registered = {name.removeprefix("aten::") for name in registrations if name.startswith("aten::")}
    lists = (
        autocast.LOWER_PRECISION,
        autocast.FLOAT32,
        autocast.FLOAT32_BY_ARGUMENT,
        autocast.WIDEST,
    )
    listed = [name for names in lists for name in names]
    assert len(listed) == len(set(listed))
    assert registered - set(listed) <= NOT_LISTED
    assert set(listed) - registered == LISTED_BESIDES


def test_the_flags_of_attention_backends_say_what_sdpa_kernel_chose() -> None:
    with relied_on_by(ATTENTION):
        flags = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled
        assert [flag() for flag in flags] == [True, True]
        with sdpa_kernel(SDPBackend.MATH):
            assert [flag() for flag in flags] == [False, False]


def test_trl_folds_its_tiles_in_functions_that_can_be_replaced() -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    with relied_on_by("hf_memopt/planning/simulation/patched_trl.py"):
        code = inspect.getsource(chunked_logprob.ChunkedLogProbFunction)
        assert {"_forward_tile", "_backward_tile", "_addmm_fp32"} <= set(re.findall(r"\w+", code))
        assert "_use_triton(hidden_states.device)" in inspect.getsource(utils.add_fused_lm_head)


def test_transformers_takes_fake_tensors_for_a_trace_where_it_is_told_otherwise() -> None:
    """Watch first that the patch is needed, then that it reaches its user."""
    with relied_on_by("hf_memopt/planning/simulation/patched_transformers.py"), FakeTensorMode():
        assert transformers_utils.is_tracing(torch.zeros(2))
    assert masking_utils.is_tracing is transformers_utils.is_tracing


def test_accelerate_asks_for_the_default_device() -> None:
    with relied_on_by(ACCELERATE):
        assert isinstance(PartialState.default_device, property)
        assert "self.default_device" in inspect.getsource(PartialState)


def test_torch_has_a_backend_in_python() -> None:
    with relied_on_by(DEVICE):
        parameters = inspect.signature(backend_registration._setup_privateuseone_for_python_backend).parameters
        assert {"rename", "backend_module"} <= parameters.keys()
        assert inspect.isclass(backend_registration._DummyBackendModule)


def test_parameters_can_be_swapped_in_place() -> None:
    with relied_on_by(DEVICE):
        first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))
        torch._C._swap_tensor_impl(first, second)
        assert torch.equal(first, torch.ones(3))


def test_foreach_is_chosen_by_class_in_lists_that_lack_fakes() -> None:
    with relied_on_by(DEVICE):
        assert {torch.Tensor, nn.Parameter} <= set(torch_optimizer._foreach_supported_types)
        assert torch.Tensor in _foreach_utils._foreach_supported_types
        assert FakeTensor not in {*torch_optimizer._foreach_supported_types, *_foreach_utils._foreach_supported_types}


def test_fake_grouped_products_refuse_float32_before_torch_2_15() -> None:
    """Watch the reason for a workaround, which can go with older versions' support."""
    with relied_on_by(UNKNOWNS), FakeTensorMode():
        rows, weights = torch.zeros(8, 16), torch.zeros(2, 16, 16)
        ends = torch.zeros(2, dtype=torch.int32)
        refused = pytest.raises(RuntimeError, match=r"(?i)bfloat16|bf16")
        with refused if torch.__version__ < (2, 15) else nullcontext():
            assert torch._grouped_mm(rows, weights, ends).shape == (8, 16)


def test_custom_operators_say_that_they_lack_a_fake_implementation() -> None:
    @torch.library.custom_op("planning_canary::plain", mutates_args=())
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with relied_on_by(UNKNOWNS), FakeTensorMode(), pytest.raises(RuntimeError, match="no fake impl registered"):
        plain(torch.zeros(2))


def test_the_first_operation_on_fake_tensors_imports_dynamo() -> None:
    """Watch the reason for an import in `simulation.device`."""
    source = inspect.getsource(torch._compile._disable_dynamo)
    assert "torch._dynamo" in source


def test_an_alias_that_is_made_under_dispatch_modes_shares_the_version_counter() -> None:
    """Watch that only aliases made in a mode's own handler have other counters, so guards work under modes."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    whole = torch.zeros(4, 4)
    with relied_on_by("hf_memopt/activations/checkpointing/save_policies.py"), Watching(), Watching():
        for tensor in (whole, whole[1:], whole.t()):
            alias = tensor.detach()
            alias.data = torch.empty(0)
            tensor.add_(1)
            assert alias._version == tensor._version == whole._version > 0


def test_a_simulation_renames_the_backend_in_its_own_process_only() -> None:
    from simulated import simulated

    with relied_on_by(DEVICE):
        assert simulated(lambda device: torch._C._get_privateuse1_backend_name()) == "virtualcuda"
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"


def test_torch_runs_a_rank_without_others() -> None:
    """Watch the internal names that run a rank without others."""
    with relied_on_by(RANKS):
        assert {"cpu", "cuda"} <= set(distributed.Backend.backend_capability[BACKEND])
        assert issubclass(FakeStore, distributed.Store)
        for holder, name in (
            (distributed, "_verify_params_across_processes"),
            (distributed.Reducer, "_rebuild_buckets"),
            (distributed.Logger, "set_runtime_stats_and_log"),
        ):
            assert name in vars(holder)
        source = inspect.getsource(DistributedDataParallel)
        assert "self.reducer._rebuild_buckets()" in source
        assert "self.logger.set_runtime_stats_and_log()" in source


def test_a_device_mesh_computes_with_the_numbers_of_ranks() -> None:
    """Watch first that the patch is needed, then that it reaches FSDP2."""
    with relied_on_by(RANKS):
        assert "torch.arange" in inspect.getsource(device_mesh.init_device_mesh)
        assert fsdp_init.init_device_mesh is device_mesh.init_device_mesh


def test_dtensors_find_shapes_on_tensors_without_memory() -> None:
    with relied_on_by(RANKS):
        source = inspect.getsource(ShardingPropagator._propagate_tensor_meta_non_cached)
        assert "detect_fake_mode() or FakeTensorMode()" in source


def test_fsdp2_frees_weights_by_resizing_their_storages() -> None:
    with relied_on_by("hf_memopt/planning/accounting/allocation_log.py"):
        assert "storage.resize_(0)" in inspect.getsource(fsdp_param.free_storage)
        assert "storage.resize_(size)" in inspect.getsource(fsdp_param.alloc_storage)


def test_accelerate_asks_which_backend_there_is() -> None:
    with relied_on_by(ACCELERATE):
        assert "self._prepare_backend(cpu, use_sagemaker_dp, original_backend)" in inspect.getsource(PartialState)
        assert "ACCELERATE_TORCH_DEVICE" in inspect.getsource(PartialState)


def test_torch_calls_tensors_that_are_too_large_so() -> None:
    tensor = torch.empty(1, 1, device="meta")
    for num_columns, words in zip((1, 4), TOO_LARGE, strict=True):
        with relied_on_by("hf_memopt/planning/simulation/child_process.py"), pytest.raises(RuntimeError, match=words):
            tensor.expand(2**62, num_columns).contiguous()


def test_the_cache_of_fake_operations_knows_arguments_by_one_method() -> None:
    with relied_on_by(FAKE_MODE):
        parameters = list(inspect.signature(FakeTensorMode._prep_args_for_hash).parameters)
        assert parameters == ["self", "result", "args", "state", "id_hashed_objects"]
        assert "self._prep_args_for_hash(key_values, args, " in inspect.getsource(FakeTensorMode._cache_key)


def test_results_of_fake_operations_are_made_from_the_cache_by_one_method() -> None:
    with relied_on_by(FAKE_MODE):
        parameters = list(inspect.signature(FakeTensorMode._get_output_tensor_from_cache_entry).parameters)
        assert parameters[:4] == ["self", "state", "entry", "key"]
        assert parameters[4:] in (["func", "args"], ["args"])
        source = inspect.getsource(FakeTensor.__new__)
        assert "Tensor._make_subclass(" in source
        assert "torch._C._set_warn_deprecated_on_mutable_data_ptr(self)" in source
        parameters = list(inspect.signature(FakeTensorMode._dispatch_impl).parameters)
        assert parameters == ["self", "func", "types", "args", "kwargs"]


def test_modes_are_wrapped_to_be_left_alone_by_the_compiler() -> None:
    with relied_on_by(FAKE_MODE):
        assert TorchDispatchMode._should_skip_dynamo()
        assert FakeTensorMode.__torch_dispatch__ is not inspect.unwrap(FakeTensorMode.__torch_dispatch__)
