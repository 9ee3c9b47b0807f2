"""A row of small line plots as SVG text: hit rate over slots, one panel per trace. Only what cache_policies.py needs."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, COLUMNS = 200, 150, 36, 34, 3
COLOURS = ("#888888", "#0072b2", "#d55e00")


def draw(panels: dict[str, dict[str, Sequence[float]]], x: Sequence[int]) -> str:
    """The plot: `panels[title][line]` are percentages over the equally spaced marks x; all panels share names and colours of lines."""
    names = list(next(iter(panels.values())))
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * (WIDTH + LEFT) + 20, rows * (HEIGHT + 50) + TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, name in enumerate(names):
        parts.append(f'<text x="{LEFT + 200 * i}" y="18" fill="{COLOURS[i]}" font-weight="bold">{escape(name)}</text>')
    for i, (title, lines) in enumerate(panels.items()):
        left, top = LEFT + i % COLUMNS * (WIDTH + LEFT), TOP + 16 + i // COLUMNS * (HEIGHT + 50)
        parts.append(f'<text x="{left}" y="{top - 5}">{escape(title)}</text>')
        for percent in (0, 50, 100):
            y = top + HEIGHT * (1 - percent / 100)
            parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#cccccc"/><text x="{left - 26}" y="{y + 4:.1f}">{percent}</text>')
        places = [left + 8 + (WIDTH - 16) * j / (len(x) - 1) for j in range(len(x))]
        parts += [
            f'<text x="{place:.1f}" y="{top + HEIGHT + 14}" text-anchor="middle">{mark}</text>'
            for place, mark in zip(places, x, strict=True)
        ]
        for name, colour in zip(names, COLOURS, strict=False):
            points = " ".join(f"{place:.1f},{top + HEIGHT * (1 - v / 100):.1f}" for place, v in zip(places, lines[name], strict=True))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])
