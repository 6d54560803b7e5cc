"""Other libraries' trainers: a whole run on a tiny model, with the lines that matter marked `# hf_memopt`."""
