"""A frozen module that visits the device whenever it is called, for loops of other libraries."""

from typing import Any

from hf_memopt.weights.offload import OffloadedTeacher


class VisitsByCall:
    """Makes each call of a teacher's module a visit (`OffloadedTeacher.onload`), so that a loop needs no change.

    The module stays the object that the loop holds; its `forward` is replaced on the instance. Hooks around it would
    not do: torch goes through the module's hooks when a call fails, while the end of a visit takes some of them away.
    Only calls of the module count. Code that reads its weights or runs a part of it between calls finds them on the
    host.

    Args:
        teacher: whose module is called.
    """

    def __init__(self, teacher: OffloadedTeacher) -> None:
        self.teacher = teacher
        self._replaced = vars(teacher.module).get("forward")
        self._forward = teacher.module.forward
        teacher.module.forward = self._visit

    def remove(self) -> None:
        """Restore the module's own `forward`. The module is on the host, and stays frozen."""
        module = self.teacher.module
        del module.forward
        if self._replaced is not None:
            module.forward = self._replaced

    def _visit(self, *args: Any, **kwargs: Any) -> Any:
        with self.teacher.onload():
            return self._forward(*args, **kwargs)
