import torch
from lgt_toys import tiny

from hf_memopt.recipes.lgt import data as lgt_data
from hf_memopt.recipes.lgt.options import Options
from hf_memopt.recipes.lgt.report import checklist, evaluate
from hf_memopt.recipes.lgt.step import build_model

HELD_OUT = {"swd": 0.3, "swd_untranslated": 1.0, "ssm": 0.2, "ssm_others": 0.5}


def history(**figures: list[float]) -> list[dict[str, float]]:
    always = {**HELD_OUT, "seconds": 10.0, "num_batches": 60.0}
    return [{**always, **dict(zip(figures, each, strict=True))} for each in zip(*figures.values(), strict=True)]


def verdicts(config: Options, entries: list[dict[str, float]], memory: list[int]) -> list[str]:
    return [check.verdict for check in checklist(config, entries, memory, 1024, on_cpu=False)][1:]


def test_what_the_checklist_passes_and_fails() -> None:
    config = tiny(training__batch_size=32)
    good = history(swd=[0.9, 0.5, 0.4], ssm=[0.1, 0.3, 0.25])
    assert verdicts(config, good, [1000, 1000, 1005]) == ["passed"] * 6 + ["not applicable"]
    bad = history(swd=[0.3, 0.2, 0.41], ssm=[0.3, 0.2, 0.26], seconds=[1.0, 400.0, 400.0])
    coverage = tiny(training__batch_size=32, training__accumulation_steps=2, training__gradient_cache=True)
    assert verdicts(coverage, bad, [1000, 1020]) == ["failed"] * 6 + ["not applicable"]
    once = verdicts(config, good[-1:], [1000])
    assert once == ["not applicable"] * 2 + ["passed"] * 4 + ["not applicable"]
    few = history(swd=[0.4, 0.3], num_batches=[10.0, 10.0])
    assert verdicts(config, few, [1000, 1000])[4] == "not applicable"
    compiled = tiny(training__use_compile=True)
    assert verdicts(compiled, history(compile_seconds=[3.0, 3.0]), [1, 1])[-1] == "passed"
    assert verdicts(compiled, history(compile_seconds=[0.0, 0.0]), [1, 1])[-1] == "failed"


def test_epochs_without_evaluation_are_left_out() -> None:
    entries = history(swd=[0.5, 0.3])
    between = {"loss": 99.0, "style_swd": 99.0, "content_ssm": 99.0, "seconds": 10.0, "num_batches": 60.0}
    assert verdicts(tiny(), [entries[0], between, entries[1]], [1, 1, 1])[:4] == ["passed"] * 4


def test_a_model_that_has_learned_nothing_fails_whatever_training_measured() -> None:
    """Check that training's SWD does not count: it depends on the batches that have the target's style already."""
    config = tiny(data__num_generated=64)
    train_data, held_out = lgt_data.load(config)
    bank = lgt_data.LatentBank(train_data, config, torch.device("cpu"))
    untrained = evaluate(build_model(config), bank, held_out, config)
    lucky = [{"loss": 11.5, "style_swd": 0.28}, {"loss": 1.2, "style_swd": 0.03}]
    always = {"content_ssm": 0.1, "seconds": 10.0, "num_batches": 60.0}
    entries = [{**each, **untrained, **always} for each in lucky]
    found = checklist(config, entries, [1000, 1000], 64, on_cpu=False)
    failed = [check.name for check in found if check.verdict == "failed"]
    assert "held-out style (SWD) is the target's" in failed
    assert "held-out loss falls" in failed
