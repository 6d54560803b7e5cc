"""Tests of the elements of a storage that views show."""

import torch
from torch import Tensor

from hf_memopt.activations.saved_tensors.shown_elements import ShownElements, elements_of, is_whole


def test_views_of_the_same_elements_are_equal() -> None:
    x = torch.zeros(4, 6, 8)
    same = [x[:, :, 2:4], x[:, :, 2:4].transpose(0, 1), x.view(24, 8)[:, 2:4], x.view(24, 4, 2)[:, 1]]
    assert len({elements_of(view) for view in same}) == 1
    assert elements_of(x).runs == elements_of(x.permute(2, 0, 1)).runs == ((4 * 6 * 8 * 4, 1),)
    assert elements_of(x[1:3]) == (6 * 8 * 4, ((2 * 6 * 8 * 4, 1),))
    assert elements_of(x.view(torch.uint8)) == elements_of(x)


def random_view(x: Tensor, lots: torch.Generator) -> Tensor:
    sizes, strides = [], []
    for _ in range(int(torch.randint(1, 4, (), generator=lots))):
        sizes.append(int(torch.randint(0, 4, (), generator=lots)))
        strides.append(int(torch.randint(0, 7, (), generator=lots)))
    offset = int(torch.randint(0, 10, (), generator=lots))
    return x.as_strided(sizes, strides, offset)


def shown(view: Tensor) -> set[int]:
    places = torch.arange(64, dtype=torch.int64)
    return set(places.as_strided(view.size(), view.stride(), view.storage_offset()).flatten().tolist())


def test_no_view_is_said_to_be_shown_that_was_not() -> None:
    """Compare with elements counted one by one."""
    lots = torch.Generator().manual_seed(0)
    x = torch.zeros(64)
    num_included = 0
    for _ in range(2000):
        first, second, third = (random_view(x, lots) for _ in range(3))
        found = ShownElements.of(first, 4 * 64)
        found.add(second)
        included = found.include_all_of(third)
        num_included += included
        assert not included or shown(third) <= shown(first) | shown(second)
        if elements_of(first) == elements_of(third):
            assert shown(first) == shown(third)
    assert num_included > 100
    assert is_whole(x, 4 * 64)
    assert not is_whole(x[:32].expand(2, 32), 4 * 64)
    assert is_whole(x.view(8, 8).t(), 4 * 64)
