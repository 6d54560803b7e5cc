"""The tables of torchao's optimizers in few bits, which it keeps for a process."""

WITH_TABLES = ("adamw-8bit", "adamw-4bit")


def make_tables() -> None:
    """Make the tables of torchao's optimizers: one that finds none makes them in the step, unlike all others."""
    from torchao.optim import subclass_4bit, subclass_8bit

    for module in (subclass_4bit, subclass_8bit):
        module.get_qmap_signed()
        module.get_qmap_unsigned()
