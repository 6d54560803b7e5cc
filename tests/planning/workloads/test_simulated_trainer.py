from pathlib import Path
from typing import Any

import pytest
import torch
import trl_trainers
from late_imports import LateModule
from simulated import simulated

from hf_memopt import ActivationOffloader
from hf_memopt.planning.simulation import DEVICE_TYPE

batches = LateModule("hf_memopt.planning.workloads.trainer_batches")
simulated_trainer = LateModule("hf_memopt.planning.workloads.simulated_trainer")
callbacks = LateModule("hf_memopt.callbacks")
transformers = LateModule("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def on_device(trainer: Any, look: Any) -> Any:
    """Return the result of `look` for a trainer on the virtual device."""
    window = batches.largest_window(trainer, 2)
    return simulated(lambda device: look(simulated_trainer.SimulatedTrainer(trainer, window, device)))


def test_weights_buffers_and_batches_are_on_the_device_and_ties_hold(tmp_path: Path) -> None:
    config = trl_trainers.decoder().config
    config.tie_word_embeddings = True
    trainer = trl_trainers.plain(tmp_path, model=transformers.LlamaForCausalLM(config))

    def look(found: Any) -> Any:
        model = found.modules["model"]
        tensors = [*model.parameters(), *model.buffers(), *found.batches[0].values()]
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        return {tensor.device.type for tensor in tensors}, tied, str(trainer.args.device), len(found.modules)

    assert on_device(trainer, look) == ({DEVICE_TYPE}, True, f"{DEVICE_TYPE}:0", 1)


def test_the_optimizer_goes_on_from_update_to_update_and_only_callbacks_that_offload_are_called(tmp_path: Path) -> None:
    trainer = trl_trainers.plain(tmp_path, gradient_accumulation_steps=2, eval_on_start=True)
    events: list[str] = []

    class Loud(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *event: Any, **kwargs: Any) -> None:
            events.append("called")

    trainer.add_callback(Loud())
    callbacks.attach(trainer, offloader=ActivationOffloader(mode="all", offload_threshold_mb=0))

    def look(found: Any) -> Any:
        steps = []
        for _ in range(3):
            found.step()
            state = trainer.optimizer.optimizer.state[trainer.model.lm_head.weight]
            steps.append((trainer.state.global_step, id(state["exp_avg"])))
        kept = [simulated_trainer.offloader_of(each) is not None for each in trainer.callback_handler.callbacks]
        return events, kept, {step for step, _ in steps}, len({state for _, state in steps})

    assert on_device(trainer, look) == ([], [True], {1}, 1)


@pytest.mark.parametrize(("flag", "name"), [("bf16", "bf16"), ("fp16", "fp16")])
def test_models_autocast_to_the_arguments_type(flag: str, name: str, tmp_path: Path) -> None:
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    trainer = trl_trainers.dpo(tmp_path, **{flag: True})
    dtypes: dict[str, set[torch.dtype]] = {"model": set(), "ref_model": set()}

    def look(found: Any) -> Any:
        for module_name, module in found.modules.items():
            layer = module.model.layers[0].mlp.down_proj
            layer.register_forward_hook(lambda layer, inputs, output, to=dtypes[module_name]: to.add(output.dtype))
        found.step()
        return dtypes, trainer.accelerator.scaler

    assert on_device(trainer, look) == ({"model": {wanted}, "ref_model": {wanted}}, None)


def test_an_offloader_of_a_callback_is_found() -> None:
    offloader = ActivationOffloader()
    assert simulated_trainer.offloader_of(callbacks.ActivationOffloadCallback(offloader)) is offloader
    assert simulated_trainer.offloader_of(transformers.TrainerCallback()) is None
