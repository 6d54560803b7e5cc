"""What this machine has, what it allows, and which features of this library work there. Read in this order:

- `devices`, `host`: accelerators and their links; memory, limits and versions.
- `features`: what this library can do there, and why not.
- `this_machine`: examines all of it.
- `doctor_page`: the findings as text.
"""

from hf_memopt.report.doctor.doctor_page import page
from hf_memopt.report.doctor.this_machine import Machine, examine

__all__ = ["Machine", "examine", "page"]
