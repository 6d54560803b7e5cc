"""Where a teacher's weights are between and during its visits to the device, one strategy a module. Read in this order:

- `placement`: what a strategy does; weights that stay on the device, and weights that are swapped in whole.
- `stream`: blocks of weights come as the module reads them.
- `shared_base`: the teacher is the student's own base without its adapters.
- `mode_choice`, `auto`: the strategy for what a step leaves free, and the teacher that measures it.
"""
