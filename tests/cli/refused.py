import pytest

from hf_memopt.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the standard error of a command that must end with exit status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hf-memopt {arguments[0]}: error: ")
    return captured.err
