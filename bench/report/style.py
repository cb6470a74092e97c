"""The colours and the style of the report and its pictures, for light and dark."""

from __future__ import annotations

LIGHT = {
    "page": "#fbfaf7",
    "card": "#ffffff",
    "ink": "#1d2329",
    "soft": "#667079",
    "rule": "#e5e2da",
    "grid": "#eceae4",
    "band": "#f4f2ec",
    "tidegate": "#0b7a75",
    "broker": "#5c6670",
    "native": "#d9730d",
    "haproxy": "#7257c5",
    "grepplabs": "#2f6fdb",
    "kroxylicious": "#c2416b",
    "other": "#8a8577",
    "warn": "#a8620a",
}
DARK = {
    "page": "#11161b",
    "card": "#181f26",
    "ink": "#e6e9eb",
    "soft": "#98a3ac",
    "rule": "#2a333c",
    "grid": "#242c34",
    "band": "#1d252d",
    "tidegate": "#3fc7bd",
    "broker": "#aab4bd",
    "native": "#f5a24b",
    "haproxy": "#ab95f2",
    "grepplabs": "#79a8ff",
    "kroxylicious": "#f08bac",
    "other": "#b3ad9d",
    "warn": "#f0b35a",
}
KEYS = ("tidegate", "broker", "native", "haproxy", "grepplabs", "kroxylicious")
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def key_of(way: str) -> str:
    """Returns the name of the colour for what clients speak to."""
    return next((key for key in KEYS if way.lower().startswith(key)), "other")


def variables() -> str:
    light, dark = (";".join(f"--{name}:{value}" for name, value in each.items()) for each in (LIGHT, DARK))
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def chart_css() -> str:
    """Returns the style of the pictures. It stands once in a page, and in every picture that is a file of its own."""
    ways = "".join(f".w-{key}{{--c:var(--{key})}}" for key in (*KEYS, "other"))
    return (
        f"{ways}"
        f"svg text{{font-family:{FONT};fill:var(--ink);font-size:12px;font-variant-numeric:tabular-nums}}"
        "svg .soft{fill:var(--soft);font-size:11px}"
        "svg .title{font-size:14px;font-weight:650}"
        "svg .head{font-size:18px;font-weight:700}"
        "svg .way{fill:var(--c);font-size:14px;font-weight:700}"
        "svg .value{font-size:12px;font-weight:600}"
        "svg .grid{stroke:var(--grid);stroke-width:1}"
        "svg .axis{stroke:var(--rule);stroke-width:1}"
        "svg .band{fill:var(--band)}"
        "svg .back{fill:var(--card)}"
        "svg .fill{fill:var(--c)}"
        "svg .area{fill:var(--c);opacity:.20}"
        "svg .area.strong{opacity:.38}"
        "svg .stroke{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
        "svg .stroke.thin{stroke-width:1.2;opacity:.75}"
        "svg .stroke.dash{stroke-dasharray:3 4}"
        "svg .whisker{stroke:var(--ink);stroke-width:1.2;opacity:.55}"
        "svg .bracket{stroke:var(--c);stroke-width:2.5;stroke-linecap:round}"
        "svg .dot{fill:var(--card);stroke:var(--c);stroke-width:2}"
    )


def page_css() -> str:
    return f"""{variables()}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 {FONT}}}
main{{max-width:1120px;margin:0 auto;padding:48px 24px 96px}}
h1{{font-size:34px;line-height:1.15;margin:0 0 8px;letter-spacing:-.02em}}
h2{{font-size:23px;line-height:1.25;margin:0 0 6px;letter-spacing:-.01em}}
h3{{font-size:15px;margin:28px 0 8px}}
p{{margin:0 0 12px;max-width:96ch}}
section p:last-child{{margin-bottom:0}}
.lead{{color:var(--soft);font-size:15px;max-width:105ch}}
.soft{{color:var(--soft);font-size:14px}}
section{{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:28px;margin-top:28px}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(225px,1fr));gap:14px;margin-top:28px}}
.card{{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:18px 20px}}
.card b{{display:block;font-size:30px;line-height:1.15;letter-spacing:-.02em;color:var(--tidegate)}}
.card b small{{font-size:15px;font-weight:600;letter-spacing:0}}
.card span{{display:block;font-size:13.5px;color:var(--soft);line-height:1.4;margin-top:6px}}
figure{{margin:18px 0 8px}}
figcaption{{color:var(--soft);font-size:13.5px;max-width:112ch;margin-top:6px}}
svg{{display:block;width:100%;height:auto}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:13.5px;width:100%;font-variant-numeric:tabular-nums}}
th,td{{padding:6px 12px 6px 0;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}}
th{{color:var(--soft);font-weight:600;vertical-align:bottom}}
th:nth-child(-n+2),td:nth-child(-n+2){{text-align:left}}
tr.next td{{border-top:1px solid var(--rule)}}
td i{{font-style:normal;color:var(--soft);font-size:12px}}
td .w{{display:inline-block;width:9px;height:9px;border-radius:3px;background:var(--c);margin-right:7px}}
.noisy{{color:var(--warn);font-weight:600}}
details{{margin:14px 0}}
summary{{cursor:pointer;color:var(--soft);font-size:14px}}
code{{font:13px/1.5 ui-monospace,'SFMono-Regular','DejaVu Sans Mono',monospace;background:var(--band);border-radius:5px;
padding:1px 5px}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;font-size:14px;margin:10px 0}}
dt{{color:var(--soft)}}dd{{margin:0}}
a{{color:var(--tidegate)}}
{chart_css()}
"""
