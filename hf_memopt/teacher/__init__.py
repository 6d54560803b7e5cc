"""Frozen modules whose weights live in host memory and visit the device."""

from hf_memopt.teacher.offload import TEACHER_MODES, OffloadedTeacher, TeacherReport

__all__ = ["TEACHER_MODES", "OffloadedTeacher", "TeacherReport"]
