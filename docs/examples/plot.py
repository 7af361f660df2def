"""What the examples print as a picture: python td3_bc.py pendulum.exp | python plot.py -234"""

import sys

WIDTH, HEIGHT, LEFT, BOTTOM = 480, 240, 60, 30


def picture(curve: list[tuple[float, float]], level: float | None = None) -> str:
    """An SVG of (step, value) pairs, and of a level to compare with."""
    steps, values = zip(*curve, strict=True)
    shown = [*values, *([] if level is None else [level])]
    low, high = min(shown), max(shown)

    def x(step: float) -> float:
        return LEFT + (step - steps[0]) / (steps[-1] - steps[0]) * (WIDTH - LEFT - 20)

    def y(value: float) -> float:
        return 15 + (high - value) / (high - low) * (HEIGHT - BOTTOM - 30)

    line = " ".join(f"{x(s):.0f},{y(v):.0f}" for s, v in curve)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}">gradient steps</text>',
    ]
    digits = 0 if high - low > 10 else 2
    parts += [f'<text x="8" y="{y(v) + 4:.0f}">{v:.{digits}f}</text>' for v in (low, high)]
    parts += [
        f'<text x="{x(s) - 8:.0f}" y="{HEIGHT - BOTTOM + 8}">{s:.0f}</text>'
        for s in (steps[0], steps[-1])
    ]
    if level is not None:
        at = f"{y(level):.0f}"
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{at}" y2="{at}" stroke="gray" '
            'stroke-dasharray="4"/>',
            f'<text x="{WIDTH - 110}" y="{float(at) - 4:.0f}" fill="gray">data: {level:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    level = float(sys.argv[1]) if len(sys.argv) > 1 else None
    rows = [tuple(map(float, row.split())) for row in sys.stdin if row.strip()]
    print(picture(rows, level))
