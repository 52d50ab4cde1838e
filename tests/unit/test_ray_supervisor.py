# SPDX-License-Identifier: Apache-2.0
"""What the supervisor of a local Ray does when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.distributed._ray_supervisor import _keep_logs


def test_logs_that_cannot_be_copied_do_not_stop_the_clean_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("x")
    _keep_logs(tmp_path, tmp_path / "kept")
    assert (tmp_path / "kept" / "raylet.out").read_text() == "x"
    (tmp_path / "file").write_text("in the way")
    _keep_logs(tmp_path, tmp_path / "file")
    assert "could not all be copied" in capsys.readouterr().err
