"""The students' processors are π0's and π0.5's; lerobot finds these factories by their names."""

from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

make_pi0_reflow_pre_post_processors = make_pi0_pre_post_processors
make_pi05_reflow_pre_post_processors = make_pi05_pre_post_processors
