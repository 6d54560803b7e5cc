"""Frozen tensors that a student and its teacher have in common."""

import torch
from torch import Tensor, nn

from hf_memopt.autograd_state import COMES_AND_GOES, PLAIN_TYPES
from hf_memopt.weights.residency.away import Classes, set_present


class SharedWeights:
    """The teacher's parameters that are bitwise the student's frozen ones of that name, held in the student's memory.

    Buffers are never shared: a student in training mode may write its own. Costs one comparison of the common tensors
    when made, and one pointer assignment per tensor and `bind`.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module | None) -> None:
        students = {} if student is None else dict(student.named_parameters(remove_duplicate=False))
        self._pairs = [
            (name, parameter, students[name], students[name]._version)
            for name, parameter in teacher.named_parameters(remove_duplicate=False)
            if name in students and _can_share(parameter, students[name])
        ]
        set_present(Classes.of(partner) for _, _, partner, _ in self._pairs)  # so that writes of `.data` count
        self.bind()
        storages = [parameter.untyped_storage() for parameter in self.parameters]
        self.num_bytes = sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def bind(self) -> None:
        """Point the teacher at the student's memory; RuntimeError if that was written, cast or unfrozen since."""
        for name, parameter, partner, version in self._pairs:
            is_written = partner._version != version or not _is_equal(parameter, partner)
            if is_written or partner.requires_grad or partner.dtype != parameter.dtype:
                raise RuntimeError(
                    f"the student's weight {name!r} was frozen and equal to the teacher's when the teacher was loaded, "
                    "but has been written, cast or unfrozen since; load the teacher again (or do not share its weights)"
                )
            if parameter is not partner:
                parameter.data = partner.data

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The teacher's parameters that own no memory."""
        return [parameter for _, parameter, _, _ in self._pairs]


def _is_equal(teacher: Tensor, student: Tensor) -> bool:
    """Return whether the student's memory is what the teacher has had, or has its bits, as after a move."""
    is_same = teacher.untyped_storage()._cdata == student.untyped_storage()._cdata
    return is_same or teacher.dtype != student.dtype or torch.equal(teacher.to(student.device), student)


def _can_share(teacher: Tensor, student: Tensor) -> bool:
    """Return whether a student tensor can stand in for the teacher's: plain, frozen and bitwise equal."""
    return (
        not student.requires_grad
        and not hasattr(student, COMES_AND_GOES)
        and type(student.data) in PLAIN_TYPES
        and type(teacher.data) in PLAIN_TYPES
        and teacher.shape == student.shape
        and teacher.dtype == student.dtype
        and torch.equal(teacher.to(student.device), student)
    )
