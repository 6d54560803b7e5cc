"""Frozen weights and the state of optimizers, which live in host memory or in files and visit the device.

README.md follows one weight.
"""

from hf_memopt.weights.base import BASE_HOMES, StreamedWeights, WeightsReport
from hf_memopt.weights.offload import OffloadedTeacher, TeacherReport, VisitsByCall
from hf_memopt.weights.optimizer import OffloadedOptimizer, OptimizerReport
from hf_memopt.weights.strategies.auto import TEACHER_MODES

__all__ = [
    "BASE_HOMES",
    "TEACHER_MODES",
    "OffloadedOptimizer",
    "OffloadedTeacher",
    "OptimizerReport",
    "StreamedWeights",
    "TeacherReport",
    "VisitsByCall",
    "WeightsReport",
]
