"""The student's processors are SmolVLA's; lerobot finds this factory by its name."""

from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors

make_smolvla_reflow_pre_post_processors = make_smolvla_pre_post_processors
