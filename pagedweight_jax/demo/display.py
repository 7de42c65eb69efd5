"""What the demo shows: a live panel, a table, a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagedweight_jax.demo.burst import Trace
from pagedweight_jax.engine.memory import format_bytes
from pagedweight_jax.paging.migration import PlanRecord

_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """Draws the last ``width`` values as bars of text."""
    levels = (np.array(values[-width:]) - low) / max(high - low, 1e-9)
    return "".join(
        _SPARKS[round(level * (len(_SPARKS) - 1))] for level in levels.clip(0, 1)
    )


def panel(trace: Trace, events: Sequence[PlanRecord], width: int = 36) -> Panel:
    """Shows the newest step."""
    frame = trace.frames[-1]
    report, memory = frame.report, frame.memory
    used, free = report.kv_blocks_used, report.kv_blocks_free
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=14)
    rows.add_column(width=width)
    rows.add_column()
    bits = [f.report.mean_bits for f in trace.frames]
    kv = [float(f.report.kv_blocks_used) for f in trace.frames]
    rows.add_row(
        "KV blocks",
        ProgressBar(total=max(1, used + free), completed=used, width=width),
        f"{used} used, {free} free",
    )
    rows.add_row("KV over time", sparkline(kv, 0, max(1, *kv), width), "")
    rows.add_row(
        "mean bits", sparkline(bits, 3, 6, width), f"{report.mean_bits:.2f} (3 to 6)"
    )
    rows.add_row(
        "requests",
        f"{report.running} running, {report.waiting} waiting,"
        f" {sum(len(f.report.preempted) for f in trace.frames)} preempted",
        "",
    )
    rows.add_row(
        "bytes",
        f"planes {format_bytes(memory.planes)}, KV {format_bytes(memory.kv)},"
        f" free {format_bytes(memory.free)},"
        f" in transfer {format_bytes(report.bytes_in_transfer)}",
        "",
    )
    recent = [Text(describe(event), style="dim") for event in events[-4:]]
    title = f"{trace.label}  step {report.step}  {frame.seconds:.1f} s"
    return Panel(Group(rows, *recent), title=title, title_align="left")


def describe(event: PlanRecord) -> str:
    """Writes one plan as one line."""
    direction = "freed" if event.freed_bytes >= 0 else "takes"
    took = event.seconds_to_commit
    when = "" if took is None else f" after {1000 * took:.0f} ms"
    return (
        f"plan {event.plan_id} at step {event.step}: {event.reason},"
        f" {event.pages_down} pages down, {event.pages_up} up, {direction}"
        f" {format_bytes(abs(event.freed_bytes))}, predicted"
        f" {event.predicted_damage:+.4f} nats, {event.outcome}{when}"
    )


def comparison(traces: Sequence[Trace]) -> Table:
    """Compares bursts in one table."""
    table = Table(title="The same burst in the same memory budget")
    table.add_column("")
    for trace in traces:
        table.add_column(trace.label, justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("requests finished", *(str(t.num_finished) for t in traces))
    row("most running at once", *(str(t.most_running) for t in traces))
    row("preemptions", *(str(t.num_preemptions) for t in traces))
    row(
        "bits lowest / mean / final",
        *(
            f"{t.bits.min():.2f} / {t.bits.mean():.2f} /"
            f" {t.frames[-1].report.mean_bits:.2f}"
            for t in traces
        ),
    )
    for kind in ("planes", "kv", "free"):
        name = {"kv": "KV", "planes": "planes", "free": "free"}[kind]
        row(
            f"{name} bytes, most",
            *(
                format_bytes(max(getattr(f.memory, kind) for f in t.frames))
                for t in traces
            ),
        )
    for kind in ("side_tables", "dense", "reserve", "budget"):
        row(
            f"{kind.replace('_', ' ')} bytes",
            *(format_bytes(getattr(t.frames[-1].memory, kind)) for t in traces),
        )
    row("steps", *(str(t.steps_of_burst) for t in traces))
    row("seconds", *(f"{t.seconds:.1f}" for t in traces))
    row("generated tokens a second", *(f"{t.tokens_per_second:.0f}" for t in traces))
    return table


def save_picture(trace: Trace, path: Path) -> None:
    """Draws the precision map over time, with KV use and mean bits above it.

    Raises:
      ModuleNotFoundError: without matplotlib; the message says how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the picture needs matplotlib; install pagedweight-jax[plot]"
        ) from None

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    curves, image = figure.subplots(2, 1, height_ratios=[1, 3], sharex=True)
    steps = np.arange(len(trace.frames))
    used = [frame.report.kv_blocks_used for frame in trace.frames]
    curves.fill_between(steps, used, color="tab:blue", alpha=0.3, step="mid")
    curves.set_ylabel("KV blocks", color="tab:blue")
    bits_axis = curves.twinx()
    bits_axis.plot(steps, [f.report.mean_bits for f in trace.frames], color="tab:red")
    bits_axis.set_ylabel("mean bits", color="tab:red")
    maps = np.stack([f.bits for f in trace.frames if f.bits is not None])
    num_steps, num_layers, num_experts, _ = maps.shape
    drawn = image.imshow(
        maps.reshape(num_steps, -1).T,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=maps.min(),
        vmax=maps.max(),
    )
    rows = np.arange(num_layers) * num_experts * 2
    image.set_yticks(rows, [f"layer {i}" for i in range(num_layers)])
    image.set_ylabel("pages (expert, gate_up | down)")
    image.set_xlabel("step")
    figure.colorbar(drawn, ax=image, label="committed bits")
    figure.suptitle(f"{trace.label}: precision of every page over a burst")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
