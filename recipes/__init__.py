"""One script per workload, run with `accelerate launch`, and the parts of each.

- `train_causal_lm`, `train_neural_operator`, `train_lgt`, `train_fluxflow`: loops of this project's own, on Accelerate.
- `train_sft`: TRL's SFTTrainer, attached to.
- `reflow_smolvla`: lerobot's loop, with accumulation.
- `common`: shared parts. Read it after one script.
- `causal_lm`, `neural_operator`, `lgt`, `fluxflow`, `sft`, `reflow`: the parts of each script.
- `configs`: files of flags, those of the demos among them.

A script imports its parts, and parts import `common`; nothing imports a script.
"""
