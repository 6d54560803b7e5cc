"""What belongs to transformers' models: found, built from their configurations, and trained. Read in this order:

- `model_config`: reads configurations, and refuses those that cannot be simulated.
- `model_batches`, `image_text`, `tasks`: what a model is trained for, and on what.
- `optimizers`, `adapters`: with what.
- `model_options`: all options.
- `model_building`, `model_update`: the model, and one update of it.
"""
