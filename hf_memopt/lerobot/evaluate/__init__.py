"""How good a student is with few Euler steps. Read in this order:

- `measure`: student and teacher on the same noise.
- `rollouts`: in an environment.
- `evaluation_table`: the comparison as table, JSON and figure.
"""
