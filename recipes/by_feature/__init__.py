"""One feature per script: a whole training loop on a tiny model, with the lines that matter marked `# hf_memopt`.

Run one by `python recipes/by_feature/<name>.py`, on a GPU where there is one.
"""
