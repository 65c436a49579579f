"""The smallest run's files, written once, and qualification tests whose outcome a test decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from t5_window import decide_tests


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide the outcome of every qualification test; after the given ones all pass."""
    return decide_tests(monkeypatch)
