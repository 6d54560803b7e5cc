"""Proofs that a switch which saves memory leaves training as it is, for anybody's switch."""

from hf_memopt.exactness.callables import verify
from hf_memopt.exactness.report import VerifyReport

__all__ = ["VerifyReport", "verify"]
