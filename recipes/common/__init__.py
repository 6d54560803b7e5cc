"""The shared parts of all recipes, in the order to read them.

- `flags`: how dataclasses become flags, numbers within a range among them, and are read from a command line or a file.
- `options`: the sections that several recipes have, and refusals before any work.
- `results`: `results.json` and figures.
- `cost`: memory and time of updates, measured, and their table.
- `loop`: accelerator, offloader, run, log and checkpoints of a loop.
- `auto_plan`: settings chosen by simulation, for `--plan` and `hf-memopt plan`.
- `out_of_memory`: reports and retries when memory runs out.
- `comparison`: the modes of offloading, each in a process of its own, for `hf-memopt compare`.
"""
