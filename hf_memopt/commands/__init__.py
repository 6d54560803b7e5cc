"""The subcommands of `hf-memopt`. Each module adds its own, and imports its libraries when it runs."""
