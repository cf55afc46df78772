"""The stylesheet of the HTML report: light and dark by the reader's setting, print, and narrow screens.

Text and its background differ by at least 4.5 : 1, lines of a picture and the page by at least 3 : 1 (WCAG AA).
Code widths run from pale to strong against the page in both schemes.
"""

STYLESHEET = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --surface: #f4f6f8; --ink: #16191d; --muted: #545c66; --rule: #d5dae0; --accent: #0a5bc4;
  --warn: #6b4a00; --warn-page: #fff3d1; --bad: #b3261e;
  --series-1: #0a5bc4; --series-2: #c2500a; --series-3: #7a3fb0; --series-4: #0b7d69; --series-5: #a8326d;
  --series-reference: #6a727c;
  --width-1: #dbe8f4; --width-2: #b0d1e6; --width-3: #7dbad1; --width-4: #469dbf;
  --width-5: #2a7db1; --width-6: #285a9e; --width-7: #2b3a80; --width-8: #1d1b50; --width-other: #b9a36a;
  --use-codes: #2a7db1; --use-norms: #d9822b; --use-padding: #98a1ab;
  --on-pale: #16191d; --on-strong: #ffffff;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --surface: #1e2226; --ink: #e8eaed; --muted: #a8b0ba; --rule: #3a4048; --accent: #7db4ff;
    --warn: #ffd98a; --warn-page: #3a2f10; --bad: #ff9a90;
    --series-1: #7db4ff; --series-2: #ffab66; --series-3: #cfa6f5; --series-4: #5fd3bb; --series-5: #f48fb6;
    --series-reference: #a0a8b2;
    --width-1: #223149; --width-2: #235078; --width-3: #28709c; --width-4: #3a94b4;
    --width-5: #62b5c0; --width-6: #95d1c9; --width-7: #c8e8d3; --width-8: #f6f9e2; --width-other: #8a7a4a;
    --use-codes: #62a8e0; --use-norms: #f0a860; --use-padding: #78828d;
    --on-pale: #ffffff; --on-strong: #0b0d10;
  }
}
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
figure { margin: 1rem 0 1.5rem; }
.pictures { display: flex; flex-wrap: wrap; gap: .75rem 1.5rem; }
.pictures .scroll > svg { display: block; width: var(--width); max-width: 100%; min-width: min(var(--width), 34rem);
  height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: 0 0 .5rem;
  font-size: .875rem; }
.legend li { max-width: 100%; overflow-wrap: anywhere; }
.swatch { width: 22px; height: 12px; margin-right: .4rem; vertical-align: -1px; }
.swatch[class*="series"] .fill, .swatch:not([class*="series"]) .line { display: none; }
.swatch.marker .fill { display: inline; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .tick { fill: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .axis { fill: var(--muted); }
svg .label { font-weight: 600; }
svg .grid { stroke: var(--rule); stroke-width: 1; fill: none; }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
svg .dot { fill: var(--c); }
svg .fill { fill: var(--c); }
svg .front { fill: none; stroke: var(--muted); stroke-width: 1.5; }
svg .mark-point .fill { stroke: var(--page); stroke-width: 1; }
svg .cell { font-size: 11px; font-variant-numeric: tabular-nums; }
svg .on-pale { fill: var(--on-pale); }
svg .on-middle { fill: #0b0d10; }
svg .on-strong { fill: var(--on-strong); }
svg .crisp { shape-rendering: crispEdges; }
.series-1 { --c: var(--series-1); } .series-2 { --c: var(--series-2); } .series-3 { --c: var(--series-3); }
.series-4 { --c: var(--series-4); } .series-5 { --c: var(--series-5); }
.series-reference { --c: var(--series-reference); }
.series-2 .line { stroke-dasharray: 7 3; } .series-3 .line { stroke-dasharray: 2 3; }
.series-4 .line { stroke-dasharray: 9 3 2 3; } .series-5 .line { stroke-dasharray: 5 5; }
.series-reference .line { stroke-dasharray: 1 4; stroke-linecap: round; }
.width-1 { --c: var(--width-1); } .width-2 { --c: var(--width-2); } .width-3 { --c: var(--width-3); }
.width-4 { --c: var(--width-4); } .width-5 { --c: var(--width-5); } .width-6 { --c: var(--width-6); }
.width-7 { --c: var(--width-7); } .width-8 { --c: var(--width-8); } .width-other { --c: var(--width-other); }
.use-codes { --c: var(--use-codes); } .use-norms { --c: var(--use-norms); } .use-padding { --c: var(--use-padding); }
.controls { display: flex; flex-wrap: wrap; gap: .5rem 1.25rem; align-items: end; margin: 1rem 0 .25rem;
  font-size: .9rem; }
.controls label { display: flex; flex-direction: column; gap: .2rem; min-width: 0; max-width: 100%;
  color: var(--muted); }
.controls label.tick-box { flex-direction: row; align-items: center; gap: .4rem; min-height: 2.25rem; }
.controls input[type="search"], .controls select { font: inherit; color: var(--ink); background: var(--page);
  border: 1px solid var(--muted); border-radius: 6px; padding: .35rem .6rem; min-height: 2.25rem; max-width: 100%; }
.controls output { color: var(--muted); min-height: 2.25rem; display: flex; align-items: center; }
.wide header, .wide nav, .wide main, .wide footer { max-width: 76rem; }
@media screen and (min-width: 76rem) {
  .wide :is(#section-pareto, #section-layers, #section-latency) { display: grid; grid-template-columns: 1fr 1fr;
    column-gap: 2rem; }
  .wide section > :not(figure) { grid-column: 1 / -1; min-width: 0; }
  .wide section > figure { min-width: 0; }
}
.no-script .controls { display: none; }
.filtered { display: none !important; }
.marked > th, .marked > td { background: var(--surface); }
.mark-point.marked .fill, svg .marked .line { stroke: var(--ink); stroke-width: 3; }
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
  figure, tr, .tiles { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll, pre { overflow: visible; }
  table { font-size: 8pt; }
  th:first-child { position: static; background: none; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .fill, .mark, .cautions, .tiles > div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { content-visibility: visible; }
}
"""
