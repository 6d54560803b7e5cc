"""Datasets by name, as all recipes load them."""

from hf_memopt.jobs.datasets_by_name import dataset_by_name as dataset_by_name
