"""Vision-language models: layouts of images as the models see them, and batches with text. Read in this order:

- `image_layouts`: tensors and tokens of an image, as each family's processor makes them.
- `image_text_batch`: these beside text.
"""
