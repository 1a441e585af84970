"""Runs drawn: what each tenant got over time, and how long its first tokens took. Needs matplotlib, an extra."""

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace.errors import SetupError
from headrace.simulate.curves import Curves, curves, most_served
from headrace.simulate.measure import Window
from headrace.simulate.outcome import Outcome

FORMATS: Final = (".png", ".svg", ".pdf")
TENANTS_MAX: Final = 8
"""Drawn on their own; the others together."""
RUNS_MAX: Final = 8
NAME_CHARACTERS_MAX: Final = 60
POINTS_MAX: Final = 2000
"""Of a line; more would only make the file larger."""
_PANEL_INCHES: Final = (5.0, 3.2)
_TTFT_S_MIN: Final = 1e-3
_MISSING: Final = "--plot needs matplotlib, which is not installed: pip install 'headrace[plot]'"


def check_plot(path: Path, runs: int) -> None:
    """Whether it can be drawn, before work is done for it. Raises `SetupError`."""
    if runs > RUNS_MAX:
        raise SetupError(f"cannot draw {runs} runs side by side; at most {RUNS_MAX}")
    if path.suffix.lower() not in FORMATS:
        raise SetupError(f"cannot draw {path}: allowed are files that end in {', '.join(FORMATS)}")
    if not has_matplotlib():
        raise SetupError(_MISSING)


def has_matplotlib() -> bool:
    """Whether it is installed."""
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # somebody forbade it, as tests do
        return False


def draw(outcomes: Sequence[Outcome], window: Window, path: Path) -> None:
    """A column for each run. Raises `SetupError`."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(_MISSING) from error
    tenants = most_served(outcomes[0], TENANTS_MAX)
    runs = [curves(outcome, window, tenants) for outcome in outcomes]
    width, height = _PANEL_INCHES
    # Without dates and random names: the same runs, the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "headrace"}):
        figure = Figure(figsize=(width * len(runs), 2 * height), layout="constrained")
        _fill(figure, runs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # letters of tenants' names that no font here has
                figure.savefig(path, metadata=metadata)
        except OSError as error:
            raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


def _fill(figure: Any, runs: Sequence[Curves]) -> None:
    panels = figure.subplots(2, len(runs), squeeze=False, sharex="row", sharey="row")
    for run, above, below in zip(runs, *panels, strict=True):
        above.set_title(_text(run.name))
        _over_time(above, run)
        _first_tokens(below, run)
    panels[0][0].set_ylim(bottom=0)  # last: it ends the scaling by what is drawn
    panels[0][0].set_ylabel("service, cost/s")
    panels[1][0].set_ylabel("part of its requests")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _over_time(panel: Any, run: Curves) -> None:
    for one in run.tenants:
        marker = "." if len(run.times_s) == 1 else None
        panel.plot(run.times_s, one.service_per_s, marker=marker, label=_text(one.tenant))
    panel.set_xlabel("s")
    panel.grid(alpha=0.3)


def _first_tokens(panel: Any, run: Curves) -> None:
    for one in run.tenants:
        count = len(one.ttft_s)
        if not count:
            panel.plot([], [])  # its colour is taken all the same
            continue
        places = np.unique(np.linspace(0, count - 1, min(count, POINTS_MAX)).round().astype(int))
        times_s = np.maximum(one.ttft_s[places], _TTFT_S_MIN)
        panel.plot([times_s[0], *times_s], [0.0, *((places + 1) / count)])
    panel.set_xscale("log")
    panel.set_xlabel("s to the first token, at most")
    panel.set_ylim(0, 1)
    panel.grid(alpha=0.3)


def _text(name: str) -> str:
    """As it is: a dollar would begin a formula, and what begins with an underscore gets no line in the legend."""
    shown = name if len(name) <= NAME_CHARACTERS_MAX else name[: NAME_CHARACTERS_MAX - 1] + "…"
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
