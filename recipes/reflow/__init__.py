"""Parts of `reflow_smolvla`, its toy model and the demo, in the order to read them.

- `lerobot_loop`: lerobot's loop and its accelerator, in each version; windows of several batches; the log of memory.
- `plan`: lerobot's update on fake tensors.
- `teacher_home`: where the teacher lives, by a plan.
- `smolvla_toy`: a small SmolVLA and a task with two right answers.
- `demo_commands`: flags and commands that this demo and Meta-World's share.
- `demo`: teacher, student, export and evaluation in one command.
- `demo_measurements`, `demo_figures`: its measurements and figures.
"""
