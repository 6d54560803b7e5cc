"""The interface of flow-matching policies for reflow."""
