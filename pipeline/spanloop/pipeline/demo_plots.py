"""Plots of the demo's report as inline SVG (matplotlib without a display)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["decisions_plot", "live_plot", "throughput_plot", "version_plot"]

INK, CHAMPION, CANDIDATE, GOOD, BAD, PALE = "#20242c", "#1f5fbf", "#d9822b", "#2e8b57", "#c0392b", "#b8c0cc"

mpl.rcParams.update(
    {
        "svg.fonttype": "none", "svg.hashsalt": "spanloop", "font.size": 10, "axes.spines.top": False,
        "axes.spines.right": False, "axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.grid": True, "grid.color": "#eceff3", "axes.axisbelow": True, "legend.frameon": False,
    }
)  # fmt: skip


def _svg(draw: Callable[[Any], None], *, width: float = 9.0, height: float = 3.6) -> str:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _limits(axes: Any, results: dict[str, Any]) -> None:
    evaluation = results["evaluation"]
    for name, colour in (("optimum", GOOD), ("random", PALE)):
        axes.axhline(evaluation[name], color=colour, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{name} {evaluation[name]:.3f}", (1.0, evaluation[name]), xycoords=("axes fraction", "data"),
            xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=9, color=INK,
        )  # fmt: skip


def _rolled_back(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in results["promotions"] if p["kind"] == "rollback"]


def _promoted(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in results["promotions"] if p["kind"] == "promotion"]


def version_plot(results: dict[str, Any]) -> str:
    """Return of each evaluated version against random and optimum; champions filled."""
    champions = {p["version"] for p in _promoted(results)}

    def draw(axes: Any) -> None:
        found = sorted((int(v), e["return"]) for v, e in results["evaluation"]["versions"].items())
        axes.plot([v for v, _ in found], [r["mean"] for _, r in found], color=PALE, linewidth=1)
        for is_champion, colour, label in ((False, CANDIDATE, "candidate"), (True, CHAMPION, "champion")):
            chosen = [(v, r) for v, r in found if (v in champions) == is_champion]
            if not chosen:
                continue
            means = [r["mean"] for _, r in chosen]
            errors = [[m - r["low"] for m, (_, r) in zip(means, chosen, strict=True)],
                      [r["high"] - m for m, (_, r) in zip(means, chosen, strict=True)]]  # fmt: skip
            axes.errorbar([v for v, _ in chosen], means, yerr=errors, fmt="o", color=colour, capsize=3, label=label,
                          markerfacecolor=colour if is_champion else "white")  # fmt: skip
        _limits(axes, results)
        axes.set_xlabel("policy version")
        axes.set_ylabel("mean outcome of a ticket")
        axes.legend(loc="center left")

    return _svg(draw)


def live_plot(results: dict[str, Any]) -> str:
    """Return while it ran (newest 500 tickets), with promotions and the injected candidate."""

    def draw(axes: Any) -> None:
        for name, colour, label in (
            ("champion_return", CHAMPION, "by the champion"),
            ("candidate_return", CANDIDATE, "by candidates"),
        ):
            points = [p for p in results["timeline"] if p[name]["count"] >= 20]
            times = [p["t_s"] for p in points]
            axes.plot(times, [p[name]["mean"] for p in points], color=colour, label=label)
            low, high = ([p[name][side] for p in points] for side in ("low", "high"))
            axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0)
        for event in _promoted(results):
            if event["t_s"] > 0:
                axes.axvline(event["t_s"], color=CHAMPION, linewidth=0.8, alpha=0.5)
        _mark_injection(axes, results)
        _limits(axes, results)
        axes.set_xlabel("seconds (vertical lines: promotions)")
        axes.set_ylabel("mean outcome, newest 500 tickets")
        axes.legend(loc="center left")

    return _svg(draw)


def _mark_injection(axes: Any, results: dict[str, Any]) -> None:
    injection = results["injection"] or {}
    if injection.get("phone_opened_s") is not None and injection.get("ended_s") is not None:
        axes.axvspan(injection["phone_opened_s"], injection["ended_s"], color=BAD, alpha=0.12, linewidth=0)
        axes.annotate(
            "bad candidate\nin canary", (injection["ended_s"], 1.0), xycoords=("data", "axes fraction"), xytext=(3, -4),
            textcoords="offset points", va="top", fontsize=9, color=BAD,
        )  # fmt: skip


def decisions_plot(results: dict[str, Any]) -> str:
    """For each decision the champion's gain over the best rule that does not see the state."""

    def draw(axes: Any) -> None:
        names = list(results["decisions"])
        gains = [results["decisions"][name]["gain"] for name in names]
        means = [g["mean"] for g in gains]
        errors = [
            [m - g["low"] for m, g in zip(means, gains, strict=True)],
            [g["high"] - m for m, g in zip(means, gains, strict=True)],
        ]
        colours = [GOOD if g["low"] > 0 else BAD for g in gains]
        axes.bar(names, means, yerr=errors, color=colours, capsize=4, width=0.55)
        axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.set_ylabel("gain over the state-blind rule")

    return _svg(draw, width=6.0, height=3.0)


def throughput_plot(results: dict[str, Any]) -> str:
    """Tickets and spans a second, and lag."""
    timeline: Sequence[dict[str, Any]] = results["timeline"][1:]
    times = [p["t_s"] for p in timeline]

    def draw(axes: Any) -> None:
        axes.plot(times, [p["tickets_per_s"] for p in timeline], color=CHAMPION, label="tickets/s")
        axes.plot(
            times, [p["spans_per_s"] / 10 for p in timeline], color=CANDIDATE, label="spans/s divided by 10"
        )
        axes.plot(times, [p["lag_s"] for p in timeline], color=BAD, label="lag in seconds", linewidth=1)
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", ncols=3)

    return _svg(draw, height=2.8)
