"""One feature per script: a whole training loop on a tiny model, with the lines that matter marked `# hf_memopt`.

Run one by `python recipes/by_feature/<name>.py`, on a GPU where there is one. In the order of reading:

- `activation_offloading`, `offload_budget`, `selective_checkpointing`: tensors that autograd saves.
- `frozen_teacher`: a model that only answers.
- `exact_accumulation`, `gradient_cache`: steps on more samples than fit at once.
- `memory_reports`: the uses of memory, and leaks.
- `estimate_then_train`: the peak before the run.
- `trainers`: TRL's trainers, attached to.
"""
