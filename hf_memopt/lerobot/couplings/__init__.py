"""Pairs of noise and a frozen teacher's answer, computed ahead of training. Read in this order:

- `key`: the inputs that a coupling depends on.
- `coupling_spec`: which couplings there are, and one batch of them.
- `store`: a folder of couplings on disk.
- `writer`: `precompute`, which writes that folder.
- `cache`: reads couplings back by sample.

A *coupling* is a noise and the target that the teacher's ODE takes it to, for one sample of the data. Reflow (arXiv
2209.03003) trains on couplings; a step that reads them from disk needs no teacher.
"""
