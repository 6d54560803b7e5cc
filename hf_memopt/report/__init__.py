"""The cost of a run, as one HTML page with figures. Only writing it needs matplotlib (extra `report`)."""

from hf_memopt.report.html_page import write_report
from hf_memopt.report.runs import Run, read_run, run_folders

__all__ = ["Run", "read_run", "run_folders", "write_report"]
