"""Helm is real; where it is not, what needs it is skipped, and `make test-deploy` brings it."""

from __future__ import annotations

import pytest

from tests.deploy.chart import helm_path


@pytest.fixture(scope="session")
def real_helm() -> str:
    """Path of Helm."""
    path = helm_path()
    if path is None:
        pytest.skip("no Helm here; make test-deploy brings it")
    return path
