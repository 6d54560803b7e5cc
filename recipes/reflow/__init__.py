"""Parts of `reflow_smolvla`, its toy model and the demo."""
