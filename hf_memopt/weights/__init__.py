"""Frozen modules whose weights live in host memory or in files and visit the device; README.md follows one weight."""

from hf_memopt.weights.offload import OffloadedTeacher, TeacherReport, VisitsByCall
from hf_memopt.weights.strategies.mode_choice import TEACHER_MODES

__all__ = ["TEACHER_MODES", "OffloadedTeacher", "TeacherReport", "VisitsByCall"]
