"""Estimates of training steps against published measurements on real GPUs: `python -m benchmarks.published`.

`measured/` has one JSON file for each source, with its licence and its kind of figure, `models.json` the published
hyperparameters. Facts come from the sources, code does not.
"""
