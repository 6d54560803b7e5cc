"""Devices and limits of this machine, and the features of this library that work there. Read in this order:

- `devices`, `host`: accelerators and their links; memory, limits and versions.
- `features`: the features that work there, and the obstacles of the others.
- `this_machine`: examines all of it.
- `doctor_page`: the findings as text.
"""

from hf_memopt.report.doctor.doctor_page import page
from hf_memopt.report.doctor.this_machine import Machine, examine

__all__ = ["Machine", "examine", "page"]
