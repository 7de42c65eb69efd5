"""The demonstration holds what it claims, on a burst of its own."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from pagedweight_jax import serve
from pagedweight_jax.demo import burst, display, run

BITS = 6


@pytest.fixture(scope="module")
def traces() -> list[burst.Trace]:
    made = []
    for label, pin_bits in (("paged", None), ("pinned", BITS)):
        with serve(
            "demo",
            memory_budget=run.BUDGET,
            max_model_len=run.MAX_MODEL_LEN,
            pin_bits=pin_bits,
        ) as llm:
            trace = burst.run_burst(llm, label, lambda trace: None, burst.PROMPTS)
            llm.check_integrity()
            made.append(trace)
    return made


@pytest.mark.slow
def test_burst_runs_at_once_only_where_experts_give_way(traces):
    paged, pinned = traces
    count = len(burst.PROMPTS)
    assert paged.num_finished == pinned.num_finished == count
    assert paged.most_running == count
    assert paged.num_preemptions == 0
    assert pinned.num_preemptions > 0 or pinned.most_running < count


@pytest.mark.slow
def test_bits_fall_under_pressure_and_come_back(traces):
    paged, pinned = traces
    assert 3 <= paged.bits.min() < 5 < paged.bits.mean()
    assert paged.bits[0] == paged.frames[-1].report.mean_bits == BITS
    assert set(pinned.bits) == {BITS}
    used = [frame.report.kv_blocks_used for frame in paged.frames]
    assert max(used) > max(f.report.kv_blocks_used for f in pinned.frames)
    assert used[-1] == 0


@pytest.mark.slow
def test_bytes_add_up_at_every_step(traces):
    for trace in traces:
        for frame in trace.frames:
            parts = dict(vars(frame.memory))
            assert parts.pop("budget") == sum(parts.values())


@pytest.mark.slow
def test_table_and_picture_show_the_traces(traces, tmp_path):
    text = io.StringIO()
    Console(file=text, width=100).print(display.comparison(traces))
    rows = [line for line in text.getvalue().splitlines() if "preemptions" in line]
    assert str(traces[1].num_preemptions) in rows[0]
    picture = tmp_path / "new" / "map.png"
    display.save_picture(traces[0], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    json.dumps(run._figures(traces[0]))


def test_sparkline_runs_from_low_to_high():
    line = display.sparkline(list(np.linspace(0, 1, 8)), 0, 1, width=8)
    assert line == "▁▂▃▄▅▆▇█"
    assert display.sparkline([9, -9], 0, 1, width=5) == "█▁"
