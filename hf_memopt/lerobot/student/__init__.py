"""Students and checkpoints. Read in this order:

- `prepare`: a teacher's checkpoint becomes a student's, and a trained student's becomes a stock SmolVLA's.
- `model_card`: the card of an exported student.
- `diagnosis`: the answer of `hf-memopt doctor --policy`.
"""
