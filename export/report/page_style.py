"""The frame of the HTML page: its style, in light and dark colours, also for the plots inside it."""

from string import Template

from .plots import ACCENT, DRAFTED, GENERATE, GRID, INK, MUTED, PLAIN, SERIES

LIGHT_AND_DARK = {
    "ink": ("#1f2933", "#e6e9ee"), "muted": ("#5f6b7a", "#9aa6b5"), "line": ("#e4e8ed", "#2e3743"),
    "draft": ("#0f766e", "#2bb8a5"), "warn": ("#c2410c", "#f08a52"), "ground": ("#f6f7f9", "#12161c"),
    "card": ("#ffffff", "#1a2028"), "guess": ("#d3efe6", "#134e48"),
}
"""Colours of the page by name."""
DARK_PLOTS = {
    INK: "#e6e9ee", MUTED: "#9aa6b5", GRID: "#2e3743", PLAIN: "#6f7c8b", GENERATE: "#4d5866", DRAFTED: "#2bb8a5",
    ACCENT: "#f08a52", "#b9c3cd": "#5c6875", "#8794a2": "#7c8896",
    **dict(zip(SERIES[1:], ("#8f9fee", "#f08a52", "#c496d8", "#b5c566", "#e883b4", "#6dbbe8", "#c9a878"), strict=True)),
}
"""Colours of the plots on a dark page."""
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$colours  :root { color-scheme: light dark; }
  body { margin: 0; background: var(--ground); color: var(--ink);
         font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
  main { max-width: 1060px; margin: 0 auto; padding: 40px 24px 64px; }
  h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em; }
  h2 { font-size: 19px; margin: 44px 0 6px; }
  p { margin: 6px 0 14px; max-width: 80ch; }
  .muted, figcaption { color: var(--muted); font-size: 14px; }
  .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px;
           margin: 26px 0 8px; }
  .card, figure, .box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
  .card { padding: 16px 18px; }
  .card b { display: block; font-size: 32px; line-height: 1.15; font-weight: 650; font-variant-numeric: tabular-nums; }
  .card span { color: var(--muted); font-size: 14px; }
  .good b { color: var(--draft); } .bad b { color: var(--warn); }
  .box { padding: 14px 18px; border-left: 5px solid var(--draft); margin: 14px 0; }
  .box p { margin: 0; max-width: none; }
  .box.warn { border-left-color: var(--warn); }
  .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px;
          margin-top: 12px; align-items: start; }
  figure { margin: 0; padding: 14px 16px 12px; }
  figure.wide { margin-top: 14px; }
  figure svg { width: 100%; height: auto; display: block; }
  figure svg text { font-family: inherit !important; }
  figcaption { margin-top: 6px; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-size: 14px; background: var(--card); margin-top: 12px;
          font-variant-numeric: tabular-nums; border: 1px solid var(--line); }
  th, td { text-align: right; padding: 6px 7px; border-bottom: 1px solid var(--line); white-space: nowrap; }
  th { color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom; line-height: 1.25; }
  th:first-child, td:first-child { text-align: left; }
  .range { display: block; font-style: normal; font-weight: 400; font-size: 12px; color: var(--muted); }
  .card .range { display: inline; font-size: 14px; margin-left: 8px; }
  .lead { margin: 22px 0 -16px; }
  tr.head td { background: var(--ground); color: var(--muted); font-weight: 600; }
  .headline { font-size: 21px; line-height: 1.35; font-weight: 600; margin: 0 0 10px; }
$more  dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 14px; margin: 12px 0; }
  dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body><main>
$body
</main></body>
</html>
""")


def themed(svg: str) -> str:
    """A plot whose colours follow the page's."""
    for colour in DARK_PLOTS:
        # A variable, since the SVG inside the page cannot know whether the reader prefers a dark one.
        svg = svg.replace(colour, f"var(--plot-{colour[1:]})")
    return svg


def colours() -> str:
    """The variables of the light page, and of the dark one."""
    pairs = LIGHT_AND_DARK | {f"plot-{colour[1:]}": (colour, shown) for colour, shown in DARK_PLOTS.items()}
    light, dark = (" ".join(f"--{name}: {pair[place]};" for name, pair in pairs.items()) for place in (0, 1))
    return f"  :root {{ {light} }}\n  @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
