"""The stylesheet of the HTML report: light and dark by the reader's setting, print, and narrow screens."""

from kvbench.reports.palette import DARK, LIGHT, variables

STYLESHEET = f"""
:root {{ color-scheme: light dark; {variables(LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ {variables(DARK)} }}
}}
"""

STYLESHEET += """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
header, nav, main, footer { max-width: 60rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; text-wrap: balance; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--rule); }
h2 a { color: inherit; text-decoration: none; }
h2 a:hover { text-decoration: underline; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; overflow-wrap: anywhere; }
p, ul.plain { margin: .6rem 0; max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; border-radius: 2px; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: 1rem; background: var(--page); padding: .5rem 1rem; z-index: 1; }
.context, footer, figcaption, caption { color: var(--muted); font-size: .875rem; }
.context { margin: .35rem 0 0; }
nav ul { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; list-style: none; padding: 0; margin: 1rem 0 0;
  font-size: .9rem; }
nav a { display: inline-block; padding: .25rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tiles > div { background: var(--surface); border-radius: 8px; padding: .8rem 1rem; min-width: 0;
  overflow-wrap: anywhere; }
.tiles dt { color: var(--muted); font-size: .875rem; }
.tiles dd { margin: 0; }
.tiles .value { font-size: 1.75rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles .value, .tiles .detail { display: block; }
.tiles .detail { font-size: .875rem; color: var(--muted); }
.cautions { background: var(--warn-page); color: var(--warn); border-radius: 8px; padding: .7rem 1rem; margin: 1rem 0; }
.cautions ul { margin: 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .75rem 0;
  min-width: 100%; }
caption { text-align: left; padding-bottom: .35rem; caption-side: top; overflow-wrap: anywhere; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--rule);
  max-width: 22rem; overflow-wrap: break-word; }
.long { min-width: 12rem; overflow-wrap: anywhere; }
th:first-child { padding-left: 0; position: sticky; left: 0; background: var(--page); }
th:first-child .long { display: block; min-width: min(12rem, 30vw); }
th:last-child, td:last-child { padding-right: 0; }
@media (min-width: 48rem) { tbody th { min-width: 10rem; } }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; border-bottom-width: 2px; }
tbody th { font-weight: 600; }
.number { text-align: right; }
td.number { white-space: nowrap; overflow-wrap: normal; }
.mark { display: inline-block; font-size: .75rem; line-height: 1.3; padding: 0 .35rem; border-radius: 4px;
  background: var(--warn-page); color: var(--warn); white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; }
.strong { font-weight: 600; }
figure { margin: 1rem 0 1.5rem; min-width: 0; }
figcaption { overflow-wrap: anywhere; }
.picture { width: var(--width); max-width: 100%; min-width: min(var(--width), 34rem); }
.picture svg { display: block; width: 100%; height: auto; overflow: visible; }
.picture svg text { font-family: system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.tooltip { position: fixed; z-index: 2; max-width: 24rem; padding: .3rem .6rem; border-radius: 6px; font-size: .85rem;
  background: var(--ink); color: var(--page); pointer-events: none; overflow-wrap: anywhere; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem 1.25rem; align-items: end; margin: 1rem 0 .25rem;
  font-size: .9rem; }
.controls label { display: flex; flex-direction: column; gap: .2rem; min-width: 0; max-width: 100%;
  color: var(--muted); }
.controls label.tick-box { flex-direction: row; align-items: center; gap: .4rem; min-height: 2.25rem; }
.controls input[type="search"], .controls select { font: inherit; color: var(--ink); background: var(--page);
  border: 1px solid var(--muted); border-radius: 6px; padding: .35rem .6rem; min-height: 2.25rem; max-width: 100%; }
.controls output { color: var(--muted); min-height: 2.25rem; display: flex; align-items: center; }
.wide header, .wide nav, .wide main, .wide footer { max-width: 88rem; }
@media screen and (min-width: 76rem) {
  .wide section:has(> figure ~ figure) { display: grid; grid-template-columns: 1fr 1fr; column-gap: 2rem; }
  .wide section > :not(figure) { grid-column: 1 / -1; min-width: 0; }
  .wide section > figure { min-width: 0; }
}
.no-script .controls { display: none; }
.filtered { display: none !important; }
.marked > th, .marked > td { background: var(--surface); }
thead button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; }
thead button:hover { color: var(--accent); }
thead button::after { content: "\\00a0\\2195"; font-weight: 400; }
th[aria-sort="ascending"] button::after { content: "\\00a0\\2191"; }
th[aria-sort="descending"] button::after { content: "\\00a0\\2193"; }
.run { border-top: 1px solid var(--rule); padding-top: .4rem; }
.run:target, .run.marked { border-top-color: var(--accent); }
details { margin: .75rem 0; }
summary { cursor: pointer; padding: .3rem 0; color: var(--accent); overflow-wrap: anywhere; }
pre { background: var(--surface); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto;
  font: .85rem/1.5 ui-monospace, monospace; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 3rem; padding-bottom: 3rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  header, nav, main, footer { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 1.25rem; }
  h1 { font-size: 1.35rem; }
}
@media print {
  :root { color-scheme: light; }
  body { font-size: 10.5pt; }
  nav, .skip, .controls { display: none; }
  thead button::after { content: none; }
  figure details { display: none; }
  figure, tr, .tiles { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll, pre { overflow: visible; }
  table { font-size: 8pt; }
  th:first-child { position: static; background: none; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .picture svg, .mark, .cautions, .tiles > div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { content-visibility: visible; }
}
"""
