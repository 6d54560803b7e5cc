"""The cost of a run, as one HTML page with figures. Only writing it needs matplotlib (extra `report`).

Read in this order:

- `runs`: reads a run's folder.
- `tables`, `figures`: its figures as rows and as pictures.
- `html_page`, `run_page`: pages of HTML from `templates/`, and the one about a run.
- `doctor/`: the abilities of this machine.
"""

from hf_memopt.report.html_page import write_report
from hf_memopt.report.runs import Run, read_run, run_folders

__all__ = ["Run", "read_run", "run_folders", "write_report"]
