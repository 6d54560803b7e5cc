"""Canaries of memory tracking in torch and in transformers' Trainer."""

import inspect

import torch
from late_imports import LateModule
from reliance import relied_on_by

transformers = LateModule("transformers")
trainer_callback = LateModule("transformers.trainer_callback")


COUNTERS = "hf_memopt/memory/device_counters.py"
CALLBACK = "callbacks/memory_logging.py"
OOM = "hf_memopt/memory/oom.py"


def test_public_memory_stats_are_made_from_the_nested_ones() -> None:
    with relied_on_by(COUNTERS):
        source = inspect.getsource(torch.accelerator.memory_stats)
        assert "_accelerator_isAllocatorInitialized()" in source
        assert "_accelerator_getDeviceStats(device_index)" in source


def test_history_is_copied_before_callbacks_log() -> None:
    with relied_on_by(CALLBACK):
        source = inspect.getsource(transformers.Trainer.log)
        assert source.index("self.state.log_history.append(output)") < source.index("self.callback_handler.on_log")


def test_callbacks_are_called_in_order_from_the_live_list() -> None:
    with relied_on_by(CALLBACK):
        assert "for callback in self.callbacks:" in inspect.getsource(trainer_callback.CallbackHandler.call_event)


def test_backward_runs_under_its_name() -> None:
    names = []

    class Record(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            names.extend(frame.function for frame in inspect.stack())
            return gradient

    Record.apply(torch.ones(1, requires_grad=True)).backward()
    with relied_on_by(OOM):
        assert "_engine_run_backward" in names


def test_what_a_node_saved_can_be_seen_without_unpacking() -> None:
    def unpack(packed: object) -> torch.Tensor:
        raise AssertionError("unpacked")

    x = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), unpack):
        y = x.exp()
    with relied_on_by("hf_memopt/memory/attribution.py"):
        assert y.grad_fn._raw_saved_result.data[0] == "packed"


def test_the_allocators_history_can_be_asked_for() -> None:
    with relied_on_by(OOM):
        assert callable(torch._C._cuda_isHistoryEnabled)
        assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters
        recording = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
        assert {"max_entries", "stacks"} <= recording.keys()
