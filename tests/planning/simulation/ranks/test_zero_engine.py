"""The simulated first rank under DeepSpeed's ZeRO, compared with real processes on the CPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from deepspeed_builds import ADAM, built, needs_builds
from engine_ranks import check_first_rank

from hf_memopt.planning.accounting.categories import COMMUNICATION, GATHERED, GRADIENT, OPTIMIZER_STATE, PARAMETER

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.mark.ranks
def test_two_real_ranks_hold_the_same_bytes_after_an_update_and_at_the_peak_of_each_phase(tmp_path: Path) -> None:
    of_two, of_three = check_first_rank(tmp_path, 2, "ZERO_WAYS").values()
    assert {PARAMETER, GRADIENT, OPTIMIZER_STATE, COMMUNICATION} <= of_two & of_three
    assert GATHERED in of_three - of_two


@pytest.mark.ranks
@needs_builds
def test_two_real_ranks_with_an_optimizer_on_the_host_do_so_too(tmp_path: Path) -> None:
    check_first_rank(tmp_path, 2, "OFFLOADING_ZERO_WAYS", **built(ADAM))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "ways"), [(3, "ZERO_WAYS"), (2, "MORE_ZERO_WAYS"), (3, "MORE_ZERO_WAYS")])
def test_so_do_others(num_ranks: int, ways: str, tmp_path: Path) -> None:
    check_first_rank(tmp_path, num_ranks, ways)
