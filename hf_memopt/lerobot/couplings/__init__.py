"""Couplings that are computed ahead of training, on disk.

A *coupling* is a noise and the target that the teacher's ODE takes it to, for one sample of the data. Reflow (arXiv
2209.03003) trains on couplings; a step that reads them from disk needs no teacher.
"""
