"""Tests of containers do not drop out of CI unseen."""

from pathlib import Path

import pytest

HERE = Path(__file__)


def test_images_that_cannot_be_made_fail_under_ci_and_are_skipped_elsewhere(request, monkeypatch):
    conftest = request.config.pluginmanager.get_plugin(str(HERE.with_name("conftest.py")))
    monkeypatch.setenv(conftest.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no images"):
        conftest.lacking("no images")
    monkeypatch.delenv(conftest.REQUIRED)
    with pytest.raises(pytest.skip.Exception, match="no images"):
        conftest.lacking("no images")
    assert f"export {conftest.REQUIRED}=1\n" in (HERE.parents[2] / ".ci" / "run").read_text(encoding="utf-8")
