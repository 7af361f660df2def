"""A plot of each workload: its contestants' medians, quartiles as whiskers.

`python -m benchmarks.plots DIR bench.json ...` draws what earlier runs wrote.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.report import merged

OURS, THEIRS = "#1f6f8b", "#b9bec4"
OTHERS = (
    "LeRobot", "Minari", "TorchRL", "cpprb", "environments alone", "h5py", "numpy", "tensorstore",
    "the device", "zarr",
)  # fmt: skip
LABEL_CHARACTERS = 44
TITLE_CHARACTERS = 110
BARS_MOST = 40  # more would not be readable


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """One SVG per workload and unit, named after the workload.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib; pip install 'expstore[plot]'") from None
    matplotlib.use("svg")
    # Text stays text and names are the same in every run: small files that change little.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 8})
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for workload in document["workloads"]:
        units = dict.fromkeys(figure["unit"] for figure in workload["figures"])
        for number, unit in enumerate(units):
            suffix = f"-{number + 1}" if len(units) > 1 else ""
            path = folder / f"{workload['workload']}{suffix}.svg"
            figures = [f for f in workload["figures"] if f["unit"] == unit][:BARS_MOST]
            _bars(figures, unit, workload, path)
            paths.append(path)
    return paths


def _bars(figures: list[dict[str, Any]], unit: str, workload: dict[str, Any], path: Path) -> None:
    """Horizontal bars, on a logarithmic axis where the figures are far apart."""
    import matplotlib.pyplot as plt

    medians = [figure["median"] for figure in figures]
    below = [f["median"] - f["quartiles"][0] for f in figures]
    above = [f["quartiles"][1] - f["median"] for f in figures]
    names = ["\n".join(textwrap.wrap(f["contestant"], LABEL_CHARACTERS)) for f in figures]
    colours = [THEIRS if f["contestant"].startswith(OTHERS) else OURS for f in figures]
    drawn, axes = plt.subplots(figsize=(7.5, 0.9 + 0.36 * len(figures)), layout="constrained")
    at = list(range(len(figures)))
    axes.barh(at, medians, color=colours, xerr=[below, above], error_kw={"lw": 0.8})
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    if max(medians) > 20 * min(medians) > 0:
        axes.set_xscale("log")
    axes.set_xlabel(f"{unit} (median; whiskers are quartiles)")
    title = textwrap.wrap(f"{workload['workload']}: {workload['about']}", TITLE_CHARACTERS)
    drawn.suptitle("\n".join(title), x=0.01, ha="left", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawn.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(drawn)


if __name__ == "__main__":
    for drawn in draw({"workloads": merged(sys.argv[2:])}, Path(sys.argv[1])):
        print(drawn)
