"""Pairs of noise and a frozen teacher's answer, computed when needed or ahead of training. Read in this order:

- `key`: the inputs that a coupling depends on.
- `coupling_spec`: which couplings there are, and one batch of them.
- `store`: a folder of couplings on disk.
- `writer`: computes couplings ahead of training.
- `cache`: reads them back, by batch or by sample.
- `source`: `CouplingSource`, online or cached, the same bits either way.
"""

from hf_memopt.lerobot.couplings.source import CouplingSource

__all__ = ["CouplingSource"]
