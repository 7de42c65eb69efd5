import json

import pytest

from pagedweight_jax.evaluation import planner_bench


def test_the_result_is_json_with_times_device_and_versions(capsys):
    result = planner_bench.run(pages=512, repeats=3)
    assert json.loads(json.dumps(result)) == result
    for name in ("plan_lower_ms", "plan_raise_ms"):
        assert 0 < result[name]["median"] <= result[name]["p99"]
    assert {"device", "processor", "versions", "commit"} <= set(result["measured_with"])
    assert result["command"].startswith("pagedweight bench planner")
    assert "512 pages" in capsys.readouterr().out


@pytest.mark.parametrize(("pages", "repeats"), [(100, 1), (0, 1), (256, 0)])
def test_sizes_that_make_no_model_are_refused(pages: int, repeats: int):
    with pytest.raises(ValueError, match=f"pages={pages} must be a positive multiple"):
        planner_bench.run(pages=pages, repeats=repeats)
