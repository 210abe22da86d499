"""The demo's report: one HTML file that needs nothing else, from the figures of results.json.

Everything that came from outside the program is escaped; plots are inline SVG.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["write_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; }
svg { max-width: 100%; height: auto; } .big { font-size: 1.2rem; } .note { color: #555; }
"""


def _figure(width: float = 8.5, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _by_version(evaluation: dict[str, Any], champions: Sequence[int]) -> str:
    figure, axes = _figure()
    versions = sorted(evaluation["versions"], key=int)
    found = [evaluation["versions"][v]["return"] for v in versions]
    x = [int(v) for v in versions]
    mean = [r["mean"] for r in found]
    error = [[r["mean"] - r["low"] for r in found], [r["high"] - r["mean"] for r in found]]
    axes.errorbar(x, mean, yerr=error, marker="o", ms=4, capsize=3, color="#1f77b4", label="version, 95 %")
    crowned = [
        (v, evaluation["versions"][str(v)]["return"]["mean"])
        for v in champions
        if str(v) in evaluation["versions"]
    ]
    axes.scatter(
        *zip(*crowned, strict=True),
        s=110,
        facecolors="none",
        edgecolors="#d62728",
        label="promoted",
        zorder=3,
    )
    axes.axhline(evaluation["optimum"], color="#2ca02c", ls="--", label="optimum (exact)")
    axes.axhline(evaluation["random"], color="#7f7f7f", ls=":", label="random")
    axes.set(xlabel="policy version", ylabel="return a ticket")
    axes.legend(fontsize=8, loc="lower right")
    return _svg(figure)


def _over_time(samples: Sequence[dict[str, Any]], marks: Iterable[tuple[float, str, str]]) -> str:
    figure, axes = _figure()
    for key, colour, label in (
        ("champion_return", "#d62728", "champion"),
        ("candidate_return", "#1f77b4", "candidates"),
    ):
        known = [s for s in samples if s[key]["count"] >= 20]
        t = [s["t"] for s in known]
        axes.plot(t, [s[key]["mean"] for s in known], color=colour, label=f"{label}, last 500 tickets")
        axes.fill_between(
            t, [s[key]["low"] for s in known], [s[key]["high"] for s in known], color=colour, alpha=0.15
        )
    for at, text, colour in marks:
        axes.axvline(at, color=colour, lw=0.8)
        axes.annotate(
            text, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=7, rotation=90, va="top", ha="right"
        )
    axes.set(xlabel="seconds of traffic", ylabel="return a ticket, as served")
    axes.legend(fontsize=8, loc="lower right")
    return _svg(figure)


def _decisions(decisions: dict[str, Any]) -> str:
    figure, axes = _figure(height=2.6)
    names = sorted(decisions)
    gains = [decisions[n]["gain"] for n in names]
    error = [[g["mean"] - g["low"] for g in gains], [g["high"] - g["mean"] for g in gains]]
    axes.barh(names, [g["mean"] for g in gains], xerr=error, capsize=3, color="#1f77b4")
    axes.axvline(0.0, color="#222", lw=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="return a ticket above the best rule that ignores the state, 95 %")
    return _svg(figure)


def _rates(samples: Sequence[dict[str, Any]]) -> str:
    figure, axes = _figure(height=2.4)
    t = [s["t"] for s in samples]
    axes.plot(t, [s["tickets_per_s"] for s in samples], color="#1f77b4", label="tickets/s")
    axes.plot(t, [s["lag_s"] for s in samples], color="#ff7f0e", label="lag, s")
    axes.set(xlabel="seconds of traffic")
    axes.legend(fontsize=8)
    return _svg(figure)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _interval(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _marks(facts: dict[str, Any], start_ns: float) -> list[tuple[float, str, str]]:
    marks = [
        ((p["t_ns"] - start_ns) / 1e9, f"promoted v{p['version']}", "#2ca02c")
        for p in facts["promotions"]
        if p["epoch"] > 1
    ]
    for event in facts["policy_events"]:
        if event["type"] == "PolicyRolledBack":
            marks.append(((event["t_ns"] - start_ns) / 1e9, f"rolled back v{event['version']}", "#9467bd"))
    return marks


def _injected(bad: dict[str, Any] | None) -> str:
    if bad is None:
        return "<p>No bad candidate was injected.</p>"
    gate, canary = bad["gate"], bad["canary"]
    lines = [
        f"<p>Version {bad['version']} has the champion's weights except for the embedding of one word, <code>phone</code>, that no ticket "
        "had so far. The offline gate evaluates on past orchestrations, where it acts exactly like the champion. When its canary "
        "began, the desk opened its phone queue: an honest shift of the traffic that no log could have shown.</p>"
    ]
    if gate is not None:
        verdict = "passed" if gate["passed"] else f"did not pass: {gate.get('reason', '')}"
        lines.append(
            f"<p>Gate: {escape(verdict)} (difference {gate['estimate'] / 1e6:+.4f} over {gate['n']} held-out orchestrations).</p>"
        )
    if canary is not None:
        lines.append(
            f"<p>Canary: {escape(canary['verdict'])} after {canary['n_version']} of its tickets and {canary['n_against']} of the champion's; "
            f"difference in [{canary['lower'] / 1e6:+.3f}, {canary['upper'] / 1e6:+.3f}]. "
            f"Rolled back: {'yes' if bad['rolled_back'] else 'no'}.</p>"
        )
    return "".join(lines)


def write_report(facts: dict[str, Any], path: Path) -> Path:
    """Write the report of a finished run; returns its path."""
    evaluation, samples = facts["evaluation"], facts["samples"]
    champions = [p["version"] for p in facts["promotions"]]
    begun = facts["traffic_begun_ns"]
    champion = evaluation["versions"][str(facts["champion"])]
    last = evaluation["versions"].get(str(facts["last_candidate"]))
    gating = facts["gating"]
    phone = evaluation.get("phone")
    parts = [
        "<h1>spanloop demo: the dispatch desk</h1>",
        f"<p class=big>The champion v{facts['champion']} has f = <b>{_interval(champion['f'])}</b> on {evaluation['tickets']} fresh "
        "tickets, 0 being random and 1 the exact optimum."
        + (f" The last candidate v{facts['last_candidate']} has {_interval(last['f'])}." if last else "")
        + "</p>",
        f"<p>{facts['tickets']} tickets and {facts['spans']} spans in {facts['traffic_s']:.0f} s on this machine, seed {facts['seed']}; "
        f"peak memory of all processes {facts['peak_memory_mib']} MiB.</p>",
        "<h2>Return by version</h2>", _by_version(evaluation, champions),
        "<h2>Return as served</h2>", _over_time(samples, _marks(facts, begun)),
        "<h2>Each decision against its best state-blind rule</h2>", _decisions(evaluation["decisions"]),
        "<p class=note>O1 when to spawn, O2 whom to delegate to, O3 how much to tell, O4 whose report to believe, O5 when to stop. "
        "One decision of the champion is replaced by the best rule that does not see the state; both play the same tickets.</p>",
        "<h2>Promotions</h2>",
        _table(("epoch", "version", "after, s", "why"),
               ((p["epoch"], f"v{p['version']}", f"{(p['t_ns'] - begun) / 1e9:.0f}", p["reason"]) for p in facts["promotions"])),
        "<h2>The injected candidate</h2>", _injected(facts["injected"]),
        (f"<p>With half of the tickets by phone the champion has f = {_interval(phone['f'])}.</p>" if phone else ""),
        "<h2>What gating cost</h2>",
        f"<p>{gating['tickets']} of {gating['of_tickets']} tickets were served by a champion while a better candidate was there "
        f"(by their returns on fresh tickets); together they lost {gating['return_lost']} of return.</p>",
        "<h2>Throughput</h2>", _rates(samples),
        "<h2>Tickets by version</h2>",
        _table(("version", "tickets", "mean return as served, 95 %"),
               ((f"v{r['version']}" if r["version"] >= 0 else "mixed", r["count"], _interval(r)) for r in facts["served_by"])),
    ]  # fmt: skip
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>spanloop demo</title><style>{_STYLE}</style><body>"
    path.write_text(page + "\n".join(parts) + "</body></html>\n")
    return path
