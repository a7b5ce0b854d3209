"""Small pictures as SVG text: lines over logarithmic axes, and grouped bars. Readable on a light and a dark page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .rows import Curve

WIDTH, LEFT, RIGHT, BELOW = 720, 70, 24, 56
#: Height of the plot, and of a line of the legend.
PLOT, LINE = 320, 20
#: Colours and dashes of the series, in order; each reads on white and on near-black.
COLOURS = ("#d1495b", "#e08e00", "#2f7ed8", "#3aa655", "#8a63d2", "#7f8c8d")
DASHES = ("none", "7 4", "2 3", "9 3 2 3", "4 2", "1 2")
STYLE = """\
text { font: 13px sans-serif; fill: #24292f }
.axis { stroke: #57606a; stroke-width: 1; fill: none }
.grid { stroke: #57606a; stroke-opacity: 0.2; stroke-width: 1 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .axis, .grid { stroke: #9da7b3 } }"""


@dataclass(frozen=True)
class Frame:
    """Where the plot lies in the picture: its top and bottom edge, below a legend in two columns."""

    labels: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Lines of the legend."""
        return -(-len(self.labels) // 2)

    @property
    def top(self) -> float:
        """Upper edge of the plot."""
        return self.rows * LINE + 24

    @property
    def bottom(self) -> float:
        """Lower edge of the plot."""
        return self.top + PLOT

    def legend(self, swatch: Callable[[int, float, float], str]) -> list[str]:
        """Labels with ``swatch(series, x, y)`` before each."""
        lines = []
        for i, label in enumerate(self.labels):
            x, y = LEFT + i // self.rows * (WIDTH - LEFT - RIGHT) / 2, 16 + i % self.rows * LINE
            lines += [swatch(i, x, y), _text(x + 42, y + 4, label, "start")]
        return lines

    def axes(self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> list[str]:
        """Both axes, a line across the plot at each tick of y, and the ticks' texts."""
        lines = [f'<path class="axis" d="M{LEFT} {self.top}V{self.bottom}H{WIDTH - RIGHT}"/>']
        for y, text in y_ticks:
            lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            lines.append(_text(LEFT - 6, y + 4, text, "end"))
        return lines + [_text(x, self.bottom + 18, text, "middle") for x, text in x_ticks]


def draw(curve: Curve) -> str:
    """The picture of a curve: grouped bars where it has groups, otherwise lines."""
    frame = Frame(tuple(curve.series))
    body = _bars(curve, frame) if curve.groups else _lines(curve, frame)
    height = frame.bottom + BELOW
    y_label = _text(0, 0, curve.y, "middle")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(f'{curve.y}, over {curve.x}')}</title>",
            f"<style>\n{STYLE}\n</style>",
            *body,
            _text((LEFT + WIDTH - RIGHT) / 2, height - 12, curve.x, "middle"),
            f'<g transform="translate(16 {frame.top + PLOT / 2}) rotate(-90)">{y_label}</g>',
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _log_scale(
    values: Sequence[float], base: int, start: float, end: float
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Place of a value on a logarithmic axis that begins and ends at powers of ``base``, and the ticks there."""
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = max(math.ceil(math.log(max(values), base) - 1e-9), low + 1)

    def place(value: float) -> float:
        return start + (math.log(value, base) - low) / (high - low) * (end - start)

    ticks = [float(base) ** power for power in range(low, high + 1)]
    return place, [(place(tick), _tick(tick)) for tick in ticks]


def _lines(curve: Curve, frame: Frame) -> list[str]:
    points = [point for series in curve.series.values() for point in series]
    heights = [y for _, y in points]
    base = 10 if max(heights) / min(heights) > 100 else 2
    at_x, x_ticks = _log_scale([x for x, _ in points], 2, LEFT, WIDTH - RIGHT)
    at_y, y_ticks = _log_scale(heights, base, frame.bottom, frame.top)

    def stroke(i: int) -> str:
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        return f'fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"'

    body = frame.axes(x_ticks, y_ticks)
    for i, series in enumerate(curve.series.values()):
        path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in sorted(series))
        body.append(f'<path d="M{path}" {stroke(i)}/>')
    return body + frame.legend(lambda i, x, y: f'<path d="M{x} {y}h32" {stroke(i)}/>')


def _bars(curve: Curve, frame: Frame) -> list[str]:
    top = max(y for series in curve.series.values() for _, y in series)
    step = next(step for power in range(-3, 9) for step in (10**power, 2 * 10**power, 5 * 10**power) if 5 * step >= top)
    steps = math.ceil(top / step * 1.05)

    def at_y(value: float) -> float:
        return frame.bottom - value / (steps * step) * PLOT

    group = (WIDTH - LEFT - RIGHT) / len(curve.groups)
    width = 0.8 * group / len(curve.series)
    body = frame.axes(
        [(LEFT + group * (i + 0.5), name) for i, name in enumerate(curve.groups)],
        [(at_y(i * step), _tick(i * step)) for i in range(steps + 1)],
    )
    for i, series in enumerate(curve.series.values()):
        for x, y in series:
            left = LEFT + group * (x + 0.1) + i * width
            size = f'width="{width - 2:.1f}" height="{frame.bottom - at_y(y):.1f}"'
            body.append(f'<rect x="{left:.1f}" y="{at_y(y):.1f}" {size} fill="{COLOURS[i % len(COLOURS)]}"/>')
            body.append(_text(left + width / 2 - 1, at_y(y) - 4, f"{y:g}", "middle"))

    def swatch(i: int, x: float, y: float) -> str:
        return f'<rect x="{x + 10}" y="{y - 6}" width="20" height="12" fill="{COLOURS[i % len(COLOURS)]}"/>'

    return body + frame.legend(swatch)
