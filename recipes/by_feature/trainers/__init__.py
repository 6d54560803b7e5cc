"""TRL's other trainers, attached to: a whole run on a tiny model, with the lines that matter marked `# hf_memopt`.

- `dpo`: preferences.
- `grpo`: rewards; TRL has no activation offloading for it.
"""
