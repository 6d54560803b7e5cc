"""`hf-memopt compare`: a recipe's own flags among its own, processes, table, file and report."""

import json
from pathlib import Path

import accelerators
import pytest
from recipe_flags import CAUSAL_LM, LGT

from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.e2e
def test_a_comparison_is_printed_and_reported(tmp_path: Path, capsys: Capture) -> None:
    flags = [*CAUSAL_LM, "--cpu_copies", f"--output_dir={tmp_path}"]
    with accelerators.on_the_cpu():
        assert main(["compare", "train_causal_lm", "--modes", "off,all", *flags, "--steps", "4"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["mode", "off", "all"]
    assert printed[1].endswith("reference")
    assert printed[2].endswith("equal, bit for bit")
    assert printed[-1] == f"wrote {tmp_path / 'comparison.json'}"
    off, offloaded = json.loads((tmp_path / "comparison.json").read_text())["modes"]
    assert (off["equal"], offloaded["equal"]) == (None, True)
    assert off["moved_mib"] is None
    assert offloaded["moved_mib"] > 0
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [mode["mode"] for mode in found["modes"]] == ["off", "all"]
    assert found["facts"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "argument RECIPE: invalid choice: 'nope' (choose from 'causal_lm', 'fluxflow', 'lgt'"),
        (["lgt", "--modes", "off,some"], "'off,some' has no mode 'some'; choose from off, auto, inputs, all"),
        (["lgt", "--modes", "auto,off"], "'auto,off' must name off first, which the others are compared with"),
        (["lgt", "--modes", "off"], "'off' must name off first"),
        (["lgt", "--modes", "off,all,off"], "each mode once: off,all,auto"),
        (["lgt", "--modes", "off,,all"], "'off,,all' has no mode ''"),
        (["lgt", "--steps", "3"], "argument --steps: 3 must be at least 4: the first half only warms up"),
        (["train_lgt", "--data.nope", "3"], "'--data.nope' is not a flag; the nearest is --data."),
        (["lgt", *LGT, "--modes", "off,inputs"], "add --training.use_gradient_checkpointing"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("hf-memopt compare: error: ")
    assert message in line


def test_other_commands_take_no_flags_but_their_own(capsys: Capture) -> None:
    assert main(["doctor", "--nope"]) == 2
    assert "hf-memopt doctor: error: unrecognized arguments: --nope; --help" in capsys.readouterr().err
