import pytest

from hf_memopt.recipes.memory_limit.limits import ControlGroup


@pytest.fixture
def groups() -> None:
    group = ControlGroup.make()
    if group is None:
        pytest.skip("this process may not make control groups with a memory limit")
    group.remove()
