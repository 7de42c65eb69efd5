"""Every example runs."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(path), run_name="__main__")
    assert "bits" in capsys.readouterr().out
