from hf_memopt.memory.ranks import gather_from_ranks, num_ranks, rank_among_several


def test_a_process_alone_is_the_only_rank() -> None:
    assert num_ranks() == 1
    assert rank_among_several() is None
    assert gather_from_ranks({"a": 1}) == [{"a": 1}]
