"""`pagedweight demo`: the same burst with experts that give way, and pinned."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from pagedweight_jax.demo.burst import PROMPTS, Trace, run_burst
from pagedweight_jax.demo.display import comparison, describe, panel, save_picture
from pagedweight_jax.evaluation.provenance import provenance
from pagedweight_jax.serving.llm import LLM, serve

BUDGET = "75MiB"
"""Room for all experts at 6 bits and most of the burst's keys and values, not all."""

MAX_MODEL_LEN = 256


def run(picture: Path, budget: str = BUDGET) -> dict[str, Any]:
    """Runs the demonstration.

    Args:
      picture: PNG file to write.
      budget: memory budget of both runs.
    Returns:
      The figures of the closing table, ready for JSON.
    """
    console = Console()
    console.print(
        f"A burst of {len(PROMPTS)} requests in {budget}: weights, keys and values,"
        " workspace. First the experts may give way to the KV cache."
    )
    paged = _burst(console, "pagedweight", budget, None)
    console.print("Now the same with every page pinned at 6 bits.")
    pinned = _burst(console, "pinned at 6 bits", budget, 6)
    console.print(comparison([paged, pinned]))
    save_picture(paged, picture)
    console.print(f"The precision map over time is in {picture}")
    return {
        "budget": budget,
        "bursts": [_figures(paged), _figures(pinned)],
        "measured_with": provenance(),
    }


def _burst(console: Console, label: str, budget: str, pin_bits: int | None) -> Trace:
    with console.status("loading the model and compiling its steps"):
        llm = serve(
            "demo", memory_budget=budget, max_model_len=MAX_MODEL_LEN, pin_bits=pin_bits
        )
    with llm:
        trace = _watch(console, llm, label)
        if not console.is_terminal:
            for event in llm.events()[:40]:
                console.print(describe(event))
    return trace


def _watch(console: Console, llm: LLM, label: str) -> Trace:
    if not console.is_terminal:
        trace = run_burst(llm, label, lambda trace: None, PROMPTS)
        console.print(panel(trace, ()))
        return trace
    with Live(console=console, auto_refresh=False) as live:

        def show(trace: Trace) -> None:
            live.update(panel(trace, llm.events()), refresh=True)

        return run_burst(llm, label, show, PROMPTS)


def _figures(trace: Trace) -> dict[str, Any]:
    return {
        "label": trace.label,
        "finished": trace.num_finished,
        "most_running": trace.most_running,
        "preemptions": trace.num_preemptions,
        "bits_lowest": float(trace.bits.min()),
        "bits_mean": float(trace.bits.mean()),
        "bits_final": trace.frames[-1].report.mean_bits,
        "steps": trace.steps_of_burst,
        "seconds": trace.seconds,
        "tokens_per_second": trace.tokens_per_second,
    }
