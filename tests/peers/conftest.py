"""Offloaders in every mode and with every copier, for tests after those of other libraries."""

import random

import pytest
from adversarial_copier import COPIERS
from random_plans import RandomPlanner

from hf_memopt import ActivationOffloader
from hf_memopt.activations import plan_maker
from hf_memopt.transfer import Copier, lower_memory


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest) -> Copier:
    return COPIERS[request.param]()


@pytest.fixture(params=["all", "auto"])
def offloader(request: pytest.FixtureRequest, copier: Copier, monkeypatch: pytest.MonkeyPatch) -> ActivationOffloader:
    """An offloader without a threshold. In mode "auto" plans are random, and recording ends after two passes."""
    monkeypatch.setattr(plan_maker, "make_plan", RandomPlanner(random.Random(request.node.name)))
    monkeypatch.setattr(lower_memory, "measure_link", lambda *args: (1e10, 1e10))
    return ActivationOffloader(mode=request.param, offload_threshold_mb=0, copier=copier)
