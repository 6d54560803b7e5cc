"""Estimates of training steps against published measurements on real GPUs.

    python -m benchmarks.published

- `measured/`: the measurements, one JSON file for each source, with its licence and its kind of figure.
- `models.json`: the published hyperparameters of the models.
- `measurements`: reads both.
- `steps`: the measured steps, as far as the sources describe them.

Facts come from the sources, code does not.
"""
