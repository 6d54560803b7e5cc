"""Where a teacher's weights are between and during its visits to the device, one strategy a module. Read in this order:

- `placement`: the interface of a strategy; weights that stay on the device, and weights that are swapped in whole.
- `stream`: blocks of weights come as the module reads them.
- `shared_base`: the teacher is the student's own base without its adapters.
- `mode_choice`, `auto`: the choice of a strategy, and the measurements for it.
"""
