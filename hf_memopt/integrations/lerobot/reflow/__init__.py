"""Training a SmolVLA student on a teacher's couplings. Read in this order:

- `prefix`: SmolVLA's prefix, computed once for student and teacher.
- `reflow_teacher`: the teacher, loaded on first use.
- `self_teacher`: training without a second model.
- `pair_source`: noise and actions that belong to a frame of the dataset.
- `precompute_pairs`: all pairs of a run, ahead of it.
"""
