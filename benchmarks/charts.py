# SPDX-License-Identifier: Apache-2.0
"""Draw benchmarks/charts from benchmarks/results/summary.json: a PNG and an SVG for each kind of figure.

    python benchmarks/charts.py [SUMMARY [FOLDER]]
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Chart name -> title, and which figures it shows by the last part of their ids.
CHARTS = {
    "ratios": ("time of the rival over ours: above 1 is faster", lambda measure: measure.startswith("vs-")),
    "fractions": ("fraction of the floor measured in the same run",
                  lambda measure: measure in ("floor-fraction", "mma-fraction")),
}  # fmt: skip


def rows_of(figures: list[dict], shown) -> list[tuple[str, float]]:
    """(id, value) of the figures whose last part `shown` accepts, in the order of their ids."""
    return sorted((f["id"], f["value"]) for f in figures if shown(f["id"].rpartition("/")[2]))


def draw(rows: list[tuple[str, float]], title: str, source: str, target: Path) -> None:
    """Horizontal bars with a line at 1, as PNG and SVG.

    Args:
        target: path without its suffix.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([name for name, _ in rows], [value for _, value in rows], color="#3b6ea5")
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(source, fontsize=7)
    for suffix in (".png", ".svg"):
        figure.savefig(target.with_suffix(suffix), dpi=150)


def main() -> int:
    given = dict(enumerate(sys.argv))
    summary = Path(given.get(1, HERE / "results" / "summary.json"))
    folder = Path(given.get(2, HERE / "charts"))
    try:
        figures = json.loads(summary.read_text())["figures"]
    except FileNotFoundError:
        print(f"error: {summary} does not exist\nhint: python benchmarks/summary.py writes it", file=sys.stderr)
        return 2
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("error: matplotlib is not installed\nhint: pip install matplotlib", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, shown) in CHARTS.items():
        if rows := rows_of(figures, shown):
            scopes = sorted({f["scope"] for f in figures if shown(f["id"].rpartition("/")[2])})
            draw(rows, title, "; ".join(scopes), folder / name)
            print(folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
