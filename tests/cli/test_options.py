"""What the commands share: configurations are read before libraries are loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfive.cli.options import read_first
from tfive.errors import UserError


def test_what_is_read_first_keeps_every_rule_but_no_pipe_and_no_process_of_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = ["window.items=1"]
    with pytest.raises(UserError, match=r"actor\.minibatches = 4"):
        read_first(["nano"], broken)
    read_first(["nano"], broken, rules=False)  # doctor tells broken rules itself
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    read_first(["nano", str(pipe)], broken)  # would wait for a writer, and leave nothing for the run
    monkeypatch.setenv("RANK", "1")
    read_first(["nope"], [])
