"""`cost_of`, `trade_of`: what the number formats of weights cost and gain, as measured

Random weights, of which the tables of speed are made, have no outliers and hide the cost. So it is
measured with published models, and said where a format is chosen: by `infer plan`, `infer doctor`,
the log at the start and docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("SmolLM2-135M", "Gemma 3 270M")
"""The published models whose perplexity on 4,000 tokens was measured (benchmarks/quality.py)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A number format of the weights."""

    name: str
    perplexities: tuple[float, ...]
    """Of the first ones of `MODELS`."""
    rises: tuple[float, ...] = ()
    """By which fraction each perplexity is above that of float32; of formats that round anew."""
    speed: tuple[float, float] | None = None
    """Least and most of how many times as fast as bfloat16 it is, from one stream to prompts; None
    for the formats that others are compared with."""
    machine: str = ""
    """Where that was measured."""


FORMATS = (
    Measured("float32", (81.0, 76.6)),
    Measured("bfloat16", (81.0, 76.6)),
    Measured("blocks of a GGUF file", (81.3, 76.7)),
    Measured("int8", (81.1, 76.7), (0.0009, 0.0016), (1.4, 2.0), "Xeon with AMX"),
    Measured("int4", (81.2, 90.6), (0.0018, 0.182), (1.2, 3.3), "AVX-512 BF16, not AMX"),
)
"""All that was measured; the first one is the truth."""


def cost_of(weight_format: str) -> str:
    """What a format costs, such as "perplexity +38 % (SmolLM2-135M)"; "" if it rounds nothing."""
    for row in FORMATS:
        if row.name == weight_format and row.rises:
            rises = zip(row.rises, MODELS, strict=False)
            return f"perplexity {', '.join(f'{_percent(rise)} ({name})' for rise, name in rises)}"
    return ""


def trade_of(weight_format: str) -> str:
    """What a format gains and what it costs, in a line; "" if it costs nothing."""
    for row in FORMATS:
        if row.name == weight_format and row.speed:
            least, most = row.speed
            return (
                f"{least:g} to {most:g} times as fast as bfloat16 ({row.machine}), and less exact:"
                f" {cost_of(weight_format)}"
            )
    return ""


def table() -> str:
    """All that was measured, as a table in Markdown."""
    lines = [f"| weights | {' | '.join(MODELS)} |", "|---|" + "---|" * len(MODELS)]
    for row in FORMATS:
        cells = [f"{value:.1f}" for value in row.perplexities]
        for i, rise in enumerate(row.rises):
            cells[i] += f" ({_percent(rise)})"
        cells += ["—"] * (len(MODELS) - len(cells))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(rise: float) -> str:
    return f"+{100 * rise:.2g} %"
