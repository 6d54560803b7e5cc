"""What all recipes share: options, the loop, costs of modes, and plans made before the start."""
