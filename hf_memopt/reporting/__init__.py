"""What a run cost, as one HTML page and figures. Only writing the page needs matplotlib, from the extra `report`."""

from hf_memopt.reporting.html import write_report
from hf_memopt.reporting.metrics_file import METRICS_FILE, append_metrics, read_metrics
from hf_memopt.reporting.runs import Run, read_run

__all__ = ["METRICS_FILE", "Run", "append_metrics", "read_metrics", "read_run", "write_report"]
