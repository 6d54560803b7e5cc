import dataclasses

from late_imports import LateModule

known_flows = LateModule("hf_memopt.lerobot.flow.known_flows")
reflow_options = LateModule("hf_memopt.lerobot.flow.reflow_options")
configs = LateModule("lerobot.configs")


def test_types_and_fields_are_lerobots() -> None:
    assert known_flows.STOCK_TYPES == ("smolvla", "pi0", "pi05")
    for name in known_flows.POLICY_TYPES:
        config = configs.PreTrainedConfig.get_choice_class(name)()
        flow = known_flows.flow_of(config)
        assert flow.stock_type == name.removesuffix("_reflow")
        assert reflow_options.is_student(config) == name.endswith("_reflow")
        known = {field.name for field in dataclasses.fields(config)}
        assert {flow.steps_field, *flow.architecture_fields, "train_expert_only", "compile_model"} <= known
