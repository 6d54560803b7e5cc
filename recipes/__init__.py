"""One script per workload, run with `accelerate launch`."""
