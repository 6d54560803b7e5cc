from hf_memopt.recipes.metaworld_demo.measurements import POLICIES, table


def test_policies_are_named_by_checkpoint_and_steps() -> None:
    names = ["teacher_10", "teacher_4", "teacher_2", "teacher_1", "student_1", "second_1"]
    assert [policy.name for policy in POLICIES] == names
    assert [policy.title_with_steps for policy in POLICIES[::4]] == ["teacher, 10 steps", "student, 1 step"]


def test_the_mean_action_stands_below_the_policies() -> None:
    half = {name: {"successes": 1, "episodes": 2} for name in ("reach-v3", "all")}
    policy = {"title": "teacher, 1 step", "success": half, "latency_ms": 1.25, "error": 0.5}
    head, *rows = table({"policies": {"teacher_1": policy}, "mean_action": half}).splitlines()
    assert head.split() == ["reach-v3", "all", "ms", "per", "chunk", "error"]
    assert "50% (9% to 91%)" in rows[0]
    assert rows[0].split()[-2:] == ["1.2", "0.500"]
    assert rows[1].startswith("mean action, repeated")
