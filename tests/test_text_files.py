"""Hostile JSON and YAML: each ends in one short ValueError that names the field, in bounded time."""

from pathlib import Path

import pytest

from hf_memopt.command_line import one_line_errors
from hf_memopt.planning.job import read_spec
from hf_memopt.text_files import read_values

LAUGHS = "".join(
    f"  - &{letter} [{f'*{before},' * 9}]\n" for before, letter in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES = {
    "deep.json": ("[" * 200_000, "nested more than 50 levels deep"),
    "deep.yaml": ("model: " + "[" * 2000, "nested more than 50 levels deep"),
    "aliases.yaml": (f"seq_len:\n  - &a [x,x,x,x,x,x,x,x,x]\n{LAUGHS}", "more than 200,000 values, most .* 'seq_len'"),
    "cycle.yaml": ("model: &a [*a]", "'model' is nested more than 50 levels deep"),
    "digits.json": ('{"model": 1' + "0" * 5000 + "}", "Exceeds the limit"),
    "large number.json": ('{"seq_len": 100000000000000000000}', "'seq_len' is a number of more than 63 bits"),
    "escape.json": (r'{"gpu": "\u001b[2J"}', r"'gpu': \\x1b\[2J has a character that is no text"),
    "surrogate.json": (r'{"model": "\ud800"}', r"'model': \\ud800 has a character that is no text"),
    "code.yaml": ("model: !!python/object/apply:os.system ['true']", "it is no YAML"),
    "time.yaml": ("seq_len: !!timestamp now", "it is no YAML"),
    "large.yaml": (" " * 9_000_000, "larger than 8.00 MiB, and no configuration"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"spec=.*{message}") as refusal:
        read_spec(tmp_path / name)
    assert len(str(refusal.value)) < 500


def test_plain_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("a: &x [1, 2.5]\nb: *x\nc: ünï\n")
    assert read_values(tmp_path / "plain.yaml") == {"a": [1, 2.5], "b": [1, 2.5], "c": "ünï"}
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        read_values(tmp_path / "bytes.json")


def test_a_message_reaches_the_terminal_without_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: list[str]) -> None:
        raise ValueError("gpu='\x1b[2J\x07' " + "x" * 10_000)

    assert one_line_errors("program", fail, []) == 2
    line = capfd.readouterr().err
    assert line.startswith(r"program: error: gpu='\x1b[2J\x07' x")
    assert line.endswith("... (10,012 characters) (--traceback shows where)\n")
    assert len(line) < 4100
