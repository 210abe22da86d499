"""The demo's report: one HTML file that needs nothing else (styles and plots are in it)."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spanloop.pipeline.demo_plots import decisions_plot, live_plot, throughput_plot, version_plot

__all__ = ["render_report", "write_report"]

DECISIONS = {
    "O1": "triage: close, look or spawn",
    "O2": "which skill to work",
    "O3": "short or full brief",
    "O4": "whom to believe",
    "O5": "stop or go on",
}
_STYLE = """
body{font:15px/1.55 system-ui,sans-serif;color:#20242c;max-width:60rem;margin:2.5rem auto;padding:0 1.2rem}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.4rem}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.4rem 0}.card{border:1px solid #dde2ea;border-radius:.5rem;padding:.7rem 1rem;min-width:9.5rem}
.card b{display:block;font-size:1.35rem}.card span{color:#667085;font-size:.85rem}
table{border-collapse:collapse;width:100%;font-size:.92rem}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #eceff3}
th{color:#667085;font-weight:600}svg{max-width:100%;height:auto}.yes{color:#2e8b57}.no{color:#c0392b}
code,pre{background:#f5f7fa;border-radius:.3rem;padding:.1rem .3rem}pre{padding:.7rem;overflow:auto}p.note{color:#667085;font-size:.9rem}
"""


def _side(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _card(value: str, label: str) -> str:
    return f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _yes(value: bool) -> str:
    return f'<span class="{"yes" if value else "no"}">{"yes" if value else "no"}</span>'


def _cards(results: dict[str, Any]) -> str:
    totals = results["totals"]
    injection = results["injection"]
    cards = [
        _card(_side(results["champion"]["f"]), f"f of the champion, v{results['champion']['version']}"),
        _card(
            _side(results["last_candidate"]["f"]),
            f"f of the last candidate, v{results['last_candidate']['version']}",
        ),
        _card(f"{totals['tickets']:,}", f"tickets, {totals['tickets_per_s']:.1f} a second"),
        _card(f"{totals['spans']:,}", f"spans, {totals['spans_per_s']:.0f} a second"),
        _card(str(len([p for p in results["promotions"] if p["kind"] == "promotion"]) - 1), "promotions"),
        _card(f"{results['durations'].get('total_s', 0) / 60:.1f} min", "in all"),
        _card(f"{results['memory_mib'].get('sum', 0) / 1024:.1f} GiB", "peak memory, all processes"),
    ]
    if injection is not None:
        cards.append(_card(injection["outcome"], f"injected bad candidate v{injection['version']}"))
    return f'<div class="cards">{"".join(cards)}</div>'


def _decisions(results: dict[str, Any]) -> str:
    rows = [
        (
            f"<b>{name}</b> {DECISIONS.get(name, '')}",
            _side(found["gain"]),
            f"{found['exact_gain']:.3f}",
            _yes(found["beats_blind"]),
            "<br>".join(
                f"<code>{html.escape(words)}</code> {_rule(words, chances)}"
                for words, chances in found["rule"].items()
            ),
        )
        for name, found in results["decisions"].items()
    ]
    return _table(("decision", "gain a ticket, 95 %", "exact", "beats it", "the best state-blind rule"), rows)


def _rule(words: str, chances: Sequence[float]) -> str:
    pairs = zip(words.split(), chances, strict=True)
    return ", ".join(word if p == 1 else f"{word} {p:.3g}" for word, p in pairs if p > 0)


def _promotions(results: dict[str, Any]) -> str:
    rows = []
    versions = results["evaluation"]["versions"]
    for event in results["promotions"]:
        value = versions.get(str(event["version"]))
        change = (
            f"v{event['version']}"
            if event["kind"] == "promotion"
            else f"v{event['version']} &rarr; v{event['to']}"
        )
        rows.append(
            (
                f"{event['t_s']:.0f} s",
                str(event["epoch"]),
                event["kind"],
                change,
                _side(value["f"]) if value else "",
                html.escape(event["reason"]),
            )
        )
    return _table(("time", "epoch", "what", "version", "f, fresh tickets", "why"), rows)


def _injection(results: dict[str, Any]) -> str:
    found = results["injection"]
    if found is None:
        return "<p>Left out (<code>--no-inject</code>).</p>"
    gate, canary, phone = found["gate"], found["canary"], results["evaluation"]["phone"]
    text = [
        f"<p>v{found['version']} was made from the champion v{found['made_from']}: one vector of its weights was "
        f"trained, the embedding of the queue word <code>phone</code>, to end a ticket. It is finite and valid. It closes "
        f"{found['closes_phone_tickets_at_once']:.0%} of phone tickets at once. Until then no ticket had come by phone, so on the held-out "
        "tickets of the offline gate it acts like the champion. When its canary began, the desk opened its phone queue "
        "(half of the new tickets): a real shift of the traffic, which no offline test on past tickets could contain.</p>"
    ]
    rows = []
    if gate:
        rows.append(
            (
                "offline gate",
                f"{gate['estimate']:+.4f}",
                f"at least {gate['lower']:+.4f}",
                str(gate["n"]),
                _yes(gate["passed"]) + " passed",
            )
        )
    if canary:
        sides = f"[{canary['lower']:+.3f}, {canary['upper']:+.3f}]"
        count = f"{canary['n_version']} against {canary['n_against']}"
        rows.append(("canary", f"{canary['difference']:+.3f}", sides, count, html.escape(canary["verdict"])))
    text.append(_table(("test", "difference to the champion", "bound", "tickets", "verdict"), rows))
    text.append(f"<p>Outcome: <b>{html.escape(found['outcome'])}</b>.")
    if found["ended_s"] is not None and found["phone_opened_s"] is not None:
        text.append(f" It took {found['ended_s'] - found['phone_opened_s']:.0f} s from the first phone call.")
    text.append("</p>")
    if phone:
        text.append(
            f"<p>The champion itself never learned the word before the shift. With {phone['share']:.0%} of the tickets by phone its f is "
            f"{_side(phone['f'])}, against {_side(results['champion']['f'])} without.</p>"
        )
    return "".join(text)


def _gating(results: dict[str, Any]) -> str:
    cost = results["gating_cost"]
    return (
        f"<p>{cost['tickets']:,} tickets ({cost['share']:.0%}) were served by the champion while a candidate was registered that is better by at "
        f"least 0.01 on fresh tickets, {cost['outcome_lost_per_ticket']:.4f} of outcome for each ticket of the demo. That is hindsight: at the "
        "time nobody could know which candidate was better, and the bad one below was among them.</p>"
        '<p class="note">Returns of candidates that were not evaluated are taken from the line between their evaluated neighbours.</p>'
    )


def render_report(results: dict[str, Any]) -> str:
    """The whole page."""
    evaluation, totals, machine = results["evaluation"], results["totals"], results["machine"]
    cpu = ", ".join(f"{value:.1f}" for value in totals["client_cpu_ms_per_ticket"])
    memory = ", ".join(
        f"{name} {value:.0f}" for name, value in results["memory_mib"].items() if name != "sum"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>spanloop demo, seed {results["seed"]}</title><style>{_STYLE}</style></head><body>
<h1>The dispatch desk, seed {results["seed"]}</h1>
<p>A team of agents worked tickets while its spans and outcomes taught the policy that runs it. f is 0 for random decisions and 1 for the
exact optimum; intervals are 95 %, on {evaluation["tickets"]:,} fresh tickets that every version met alike.</p>
{_cards(results)}
<h2>Return by version</h2>{version_plot(results)}
<p class="note">As served, with the server's exploration floor of {evaluation["exploration"]:.2g}. Exact f of the champion, by dynamic programming over all boards:
{results["champion_f_exact"]:.3f}, and {results["champion_f_exact_without_exploration"]:.3f} without that floor.</p>
<h2>Return while it ran</h2>{live_plot(results)}
<h2>Each decision</h2>
<p>The champion against itself with one decision replaced by the best rule that does not see the state, on the same tickets.</p>
{decisions_plot(results)}{_decisions(results)}
<h2>Promotions and rollbacks</h2>{_promotions(results)}
<h2>What gating cost</h2>{_gating(results)}
<h2>The injected candidate</h2>{_injection(results)}
<h2>Throughput</h2>{throughput_plot(results)}
<p class="note">{totals["updates"]} updates, {totals["candidates"]} candidates, {totals["failed_tickets"]} failed tickets. Client CPU in ms a ticket, by process: {cpu}.
Peak resident memory in MiB: {memory}. Machine: {machine["cpus"]} CPUs, {html.escape(machine["system"])}, Python {machine["python"]}.</p>
</body></html>
"""


def write_report(results: dict[str, Any], path: Path) -> None:
    """Render and write the page."""
    path.write_text(render_report(results))
