"""Vision-language models: layouts of images as the models see them, and batches with text."""
