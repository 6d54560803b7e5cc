import copy

import pytest
import torch
from adversarial_copier import AdversarialCopier
from teacher_toys import Network
from torch import Tensor

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights import OffloadedTeacher


@pytest.fixture
def pair(network: Network) -> tuple[Network, Network]:
    """A teacher, and a student whose weights are equal: frozen embeddings, and trained others."""
    student = copy.deepcopy(network)
    student.embed.weight.requires_grad_(False)
    return network, student


def test_frozen_equal_weights_are_held_once(pair: tuple[Network, Network], x: Tensor) -> None:
    teacher, student = pair
    want = teacher(x)
    alone = OffloadedTeacher(copy.deepcopy(teacher), device="cpu", mode="swap", copier=SyncCopier())
    offloaded = OffloadedTeacher(teacher, device="cpu", mode="swap", share_with=student, copier=AdversarialCopier())
    assert teacher.embed.weight.data_ptr() == student.embed.weight.data_ptr()
    assert teacher.low.weight.data_ptr() != student.low.weight.data_ptr()
    assert offloaded.report().shared_bytes == student.embed.weight.nbytes
    assert offloaded.report().host_bytes == alone.report().host_bytes - 256
    with torch.no_grad():
        student.low.weight.zero_()  # training the student
    with offloaded.onload() as module:
        assert torch.equal(module(x), want)


def test_sharing_follows_the_student_when_it_moves(pair: tuple[Network, Network], x: Tensor) -> None:
    teacher, student = pair
    want = teacher(x)
    offloaded = OffloadedTeacher(teacher, device="cpu", mode="swap", share_with=student, copier=SyncCopier())
    student.embed.weight.data = student.embed.weight.data.clone()  # as Module.to does
    with offloaded.onload() as module:
        assert module.embed.weight.data_ptr() == student.embed.weight.data_ptr()
        assert torch.equal(module(x), want)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.requires_grad_(True),
        lambda weight: weight.add_(1),
        lambda weight: weight.data.add_(1),
        lambda weight: setattr(weight, "data", weight.data + 1),
        lambda weight: setattr(weight, "data", weight.data.double()),
    ],
    ids=["unfrozen", "written", "data written", "bound", "cast"],
)
def test_changed_shared_weights_are_refused(pair: tuple[Network, Network], change: object) -> None:
    teacher, student = pair
    offloaded = OffloadedTeacher(teacher, device="cpu", mode="swap", share_with=student, copier=SyncCopier())
    change(student.embed.weight)
    with pytest.raises(RuntimeError, match=r"'embed.weight'.*load the teacher again"), offloaded.onload():
        pass


@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_a_write_of_a_shared_weight_in_a_visit_is_an_error(pair: tuple[Network, Network], mode: str) -> None:
    teacher, student = pair
    offloaded = OffloadedTeacher(teacher, device="cpu", mode=mode, share_with=student, copier=SyncCopier())
    with pytest.raises(RuntimeError, match=r"'embed.weight' was written in a visit"), offloaded.onload() as module:
        module.embed.weight.mul_(2)
