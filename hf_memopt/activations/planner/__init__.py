"""Decides which saved storages to keep, to offload and to recompute. Plain Python: nothing here imports torch. Read in
this order:

- `profile`: what a step saved and when it used it.
- `simulator`: the timeline of a step under a plan.
- `candidates`: plans that were simulated, and the fastest for what they hold.
- `search`: proposes candidates for all budgets at once.
- `refinement`: uses the memory and time that a plan leaves.
- `offload_plan`: selects the plan for one budget.
- `offload_table`, `savings`: a plan as a table, and arithmetic for a first guess.
"""
