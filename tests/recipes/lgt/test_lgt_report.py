"""The closing checklist of an LGT run."""

from lgt_toys import tiny

from hf_memopt.recipes.lgt.config import Config
from hf_memopt.recipes.lgt.report import checklist


def history(**figures: list[float]) -> list[dict[str, float]]:
    always = {"loss": 1.0, "style_swd": 1.0, "content_ssm": 1.0, "seconds": 10.0, "num_batches": 60.0}
    return [{**always, **dict(zip(figures, each, strict=True))} for each in zip(*figures.values(), strict=True)]


def verdicts(config: Config, entries: list[dict[str, float]], memory: list[int]) -> list[str]:
    return [check.verdict for check in checklist(config, entries, memory, 1024, on_cpu=False)][1:]


def test_what_the_checklist_passes_and_fails() -> None:
    config = tiny(training__batch_size=32)
    good = history(loss=[2.0, 1.5, 1.0], style_swd=[0.2, 0.3, 0.1], content_ssm=[0.2, 0.3, 0.21])
    assert verdicts(config, good, [1000, 1000, 1005]) == ["passed"] * 6 + ["not applicable"]
    bad = history(
        loss=[1.0, 0.5, 1.5], style_swd=[0.2, 0.1, 0.3], content_ssm=[0.3, 0.2, 0.3], seconds=[1.0, 400.0, 400.0]
    )
    coverage = tiny(training__batch_size=32, training__accumulation_steps=2, training__gradient_cache=True)
    assert verdicts(coverage, bad, [1000, 1020]) == ["failed"] * 6 + ["not applicable"]
    assert verdicts(config, good[:1], [1000]) == ["not applicable"] * 4 + ["passed", "passed", "not applicable"]
    few = history(loss=[2.0, 1.0], num_batches=[10.0, 10.0])
    assert verdicts(config, few, [1000, 1000])[4] == "not applicable"
    compiled = tiny(training__use_compile=True)
    assert verdicts(compiled, history(compile_seconds=[3.0, 3.0]), [1, 1])[-1] == "passed"
    assert verdicts(compiled, history(compile_seconds=[0.0, 0.0]), [1, 1])[-1] == "failed"


def test_the_loss_has_to_fall_in_the_first_ten_epochs() -> None:
    late = history(loss=[2.0] * 10 + [1.0])
    assert verdicts(tiny(), late, [1000, 1000])[1] == "failed"
