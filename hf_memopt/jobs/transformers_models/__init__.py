"""Models of transformers: found, built from their configurations, and trained. Read in this order:

- `model_config`: reads configurations, and refuses those that cannot be simulated.
- `model_batches`, `image_text`, `tasks`: the tasks of a model, and their batches.
- `optimizers`, `adapters`: the parts that train it.
- `model_options`: all options.
- `model_building`, `model_update`: the model, and one update of it.
"""
