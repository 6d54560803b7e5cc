"""What all recipes share, in the order to read it.

- `numeric`: numbers within a range.
- `flags`: how dataclasses become flags, and are read from a command line or a file.
- `options`: the sections that several recipes have, and what is refused before any work.
- `results`: `results.json` and figures.
- `cost`: memory and time of updates, measured, and their table.
- `loop`: accelerator, offloader, run, log and checkpoints of a loop; the comparison of modes.
- `auto_plan`: settings chosen by simulation, for `--plan` and `hf-memopt plan`.
"""
