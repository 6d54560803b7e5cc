from hf_memopt.report.runs import Outcome, gain_line, outcome_line


def test_the_line_names_success_steps_and_time_of_each_policy() -> None:
    outcomes = {"teacher": Outcome(10, 0.944, 30.6), "student": Outcome(1, 0.92, 6.2)}
    assert outcome_line(outcomes) == "teacher: 94 % in 10 steps, 31 ms; student: 92 % in 1 step, 6 ms"


def test_a_rate_that_nobody_measured_is_left_out() -> None:
    assert outcome_line({"student": Outcome(2, None, 6.2)}) == "student: 2 steps, 6 ms"


def test_the_gain_is_a_sentence_where_both_are_known() -> None:
    outcomes = {"teacher": Outcome(10, 0.96, 40.0), "student": Outcome(1, 0.72, 10.0)}
    assert (
        gain_line(outcomes)
        == "An action chunk takes the student 25% of the teacher's time, and it succeeds 75% as often."
    )
    without_tries = {name: Outcome(each.num_steps, None, each.latency_ms) for name, each in outcomes.items()}
    assert gain_line(without_tries) == "An action chunk takes the student 25% of the teacher's time."
    assert gain_line({"student": outcomes["student"]}) is None
