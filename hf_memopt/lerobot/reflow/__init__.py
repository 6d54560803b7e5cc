"""Training a student on a teacher's couplings. Read in this order:

- `velocity_teacher`: the interface of a student's teacher.
- `reflow_teacher`, `self_teacher`: a checkpoint that is loaded on first use, or the student itself.
- `pair_key`: the inputs that a frame's pair depends on.
- `pair_source`: where a batch's pairs of noise and actions come from.
- `reflow_policy`: the training loss, mixed into a policy of lerobot's.
- `precompute_pairs`: all pairs of a run, ahead of it.
"""
