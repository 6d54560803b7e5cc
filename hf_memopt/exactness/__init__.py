"""Proofs that a switch which saves memory leaves training as it is, for anybody's switch."""

from hf_memopt.exactness.report import VerifyReport
from hf_memopt.exactness.runs import verify

__all__ = ["VerifyReport", "verify"]
