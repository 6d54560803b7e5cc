from hf_memopt.report.outcome import Outcome, outcome_line


def test_the_line_names_success_steps_and_time_of_each_policy() -> None:
    outcomes = {"teacher": Outcome(10, 0.944, 30.6), "student": Outcome(1, 0.92, 6.2)}
    assert outcome_line(outcomes) == "teacher: 94 % in 10 steps, 31 ms; student: 92 % in 1 step, 6 ms"


def test_a_rate_that_nobody_measured_is_left_out() -> None:
    assert outcome_line({"student": Outcome(2, None, 6.2)}) == "student: 2 steps, 6 ms"
