"""The subcommands of `hf-memopt`. Each module adds its own, and imports what it needs when it runs."""
