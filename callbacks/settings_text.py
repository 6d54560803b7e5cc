"""Settings of `MemoptArguments` as the text of a variable and as words of a command line."""

# Holds, for instance, "offload=auto,budget_gib=6".
VARIABLE = "HF_MEMOPT"
# Fields of several words; other values, such as a folder's name, may hold spaces.
_LISTS = ("skip",)


def words_of(text: str) -> list[str]:
    """Return "offload=auto,skip=visual lm_head" as words of a command line."""
    return [word for name, value in settings_in(text).items() for word in words_of_setting(name, value)]


def settings_in(text: str) -> dict[str, str | None]:
    """Return "offload=auto,leak_check" as settings by name; None stands for one without a value."""
    parts = [setting.strip().partition("=") for setting in text.split(",") if setting.strip()]
    return {name: value if equals else None for name, equals, value in parts}


def words_of_setting(name: str, value: str | None) -> list[str]:
    """Return a field and its value, its values or none, as words of a command line."""
    if value is None:
        return [f"--{name}"]
    values = value.split() if name in _LISTS else [value]
    return [f"--{name}", *values] if len(values) > 1 else [f"--{name}={value}"]
