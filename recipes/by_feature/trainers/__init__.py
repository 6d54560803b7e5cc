"""Other libraries' trainers and models: a whole run on a tiny model, with the lines that matter marked `# hf_memopt`.

- `dpo`: preferences, with TRL.
- `grpo`: rewards, with TRL, which has no activation offloading for it.
- `lightning_trainer`: a callback for Lightning.
- `denoising`: diffusers' UNet and DiT on Accelerate.
- `sentence_embeddings`: any loss of sentence-transformers in micro-batches.
"""
