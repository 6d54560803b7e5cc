"""Device memory of training steps that others have measured on real GPUs and published, against our estimates.

    python -m benchmarks.published

- `measured/`: the measurements, one JSON file for each source, with its licence and what kind of figure it gives.
- `models.json`: the published hyperparameters of the models.
- `measurements`: reads them.
- `steps`: the steps that were measured, as far as the sources tell.

Facts were taken over, and no code.
"""
