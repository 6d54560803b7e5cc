"""Frozen modules whose weights live in host memory and visit the device."""

from hf_memopt.teacher.offload import OffloadedTeacher, TeacherReport
from hf_memopt.teacher.strategies.mode_choice import TEACHER_MODES

__all__ = ["TEACHER_MODES", "OffloadedTeacher", "TeacherReport"]
