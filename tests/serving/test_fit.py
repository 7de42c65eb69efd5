"""A bound on the workspace that is too low costs a second compilation, no more."""

import tiny

from pagedweight_jax.serving import build
from pagedweight_jax.serving.build import build_engine


def test_budget_is_split_again_where_steps_need_more_than_the_bound(monkeypatch):
    measured = []

    def compile_programs(*args, **kwargs):
        programs = compile_(*args, **kwargs)
        measured.append(programs.workspace_bytes())
        return programs

    compile_ = build.compile_programs
    monkeypatch.setattr(build, "workspace", lambda *args: 1)
    monkeypatch.setattr(build, "compile_programs", compile_programs)
    built = build_engine(tiny.paged_model(), tiny.options(pin_bits=5))
    assert len(measured) == 2
    assert built.memory.reserve_bytes >= measured[1]
    assert built.memory.budget == 8 * 2**20
    built.engine.close()
