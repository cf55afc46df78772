"""The scripts of a comparison: Vega, and the page's own that sorts, filters and ties rows to their marks in figures.

The page is complete without them: figures are drawn in it already, and the page's own Vega draws one anew when it comes
into view, so that it answers the reader. Nothing is fetched, stored or built from text: Vega evaluates its expressions
with an interpreter, so the page's policy allows these very texts by their SHA-256, and no other script.
``[data-row]`` is whatever belongs to a row of the first table; a datum of a figure names its row in ``row``.
"""

from contextlib import suppress
from functools import cache
from importlib.metadata import version

from kvbench.cache_dir import cache_dir
from kvbench.errors import ResultError
from kvbench.progress import announce
from kvbench.results import write_text_atomically

SCRIPT = """
'use strict';
document.body.classList.remove('no-script');

function sortKey(cell, numeric) {
  if (!numeric) return cell.textContent.trim().toLowerCase();
  const given = cell.dataset.value ?? cell.textContent.replace(/[,\\u00d7%\\s]/g, '');
  const value = parseFloat(given);
  return Number.isNaN(value) ? null : value;
}

function sortBy(table, heading, direction) {
  const column = heading.cellIndex, numeric = heading.classList.contains('number'), body = table.tBodies[0];
  const keyed = Array.from(body.rows, row => [sortKey(row.cells[column], numeric), row]);
  keyed.sort(([one], [two]) => {
    if (one === null || two === null) return (one === null) - (two === null);
    return (numeric ? one - two : one.localeCompare(two)) * direction;
  });
  body.append(...keyed.map(([, row]) => row));
  for (const other of heading.parentElement.cells) other.removeAttribute('aria-sort');
  heading.setAttribute('aria-sort', direction > 0 ? 'ascending' : 'descending');
}

for (const table of document.querySelectorAll('table[data-sortable]')) {
  table.tHead.addEventListener('click', event => {
    const heading = event.target.closest('button')?.closest('th');
    if (heading) sortBy(table, heading, heading.getAttribute('aria-sort') === 'ascending' ? -1 : 1);
  });
}

const search = document.getElementById('filter-text'), choices = document.querySelectorAll('.controls select');
const baselines = document.getElementById('filter-baselines'), count = document.getElementById('filter-count');
const lines = Array.from(document.querySelectorAll('#comparison-table tbody tr'));
const signals = {hidden: [], marked: ''}, views = new Map();
const facts = new Map(lines.map(line => [line.dataset.row, JSON.parse(line.dataset.facts)]));

function filter() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean), shown = new Set();
  for (const [key, row] of facts) {
    const text = Object.values(row).join(' ').toLowerCase();
    if (words.every(word => text.includes(word)) && (baselines.checked || row.role !== 'baseline') &&
        Array.from(choices).every(choice => !choice.value || row[choice.name] === choice.value)) shown.add(key);
  }
  for (const element of document.querySelectorAll('[data-row]'))
    element.classList.toggle('filtered', !shown.has(element.dataset.row));
  for (const figure of document.querySelectorAll('figure[data-rows]'))
    figure.classList.toggle('filtered', figure.dataset.rows.split(' ').every(row => !shown.has(row)));
  count.textContent = `${shown.size} of ${facts.size} rows`;
  signals.hidden = Array.from(facts.keys()).filter(key => !shown.has(key));
  for (const view of views.values()) tell(view);
}

search.addEventListener('input', filter);
for (const control of [...choices, baselines]) control.addEventListener('change', filter);

function mark(key) {
  if (key === signals.marked) return;
  for (const element of document.querySelectorAll('.marked')) element.classList.remove('marked');
  if (key) for (const element of document.querySelectorAll(`[data-row="${CSS.escape(key)}"]`))
    element.classList.add('marked');
  signals.marked = key;
  for (const view of views.values()) tell(view);
}

function markAround(event) {
  if (!event.target.closest('.picture')) mark(event.target.closest('[data-row]')?.dataset.row ?? '');
}

document.addEventListener('pointerover', markAround);
document.addEventListener('focusin', markAround);

const tip = document.createElement('div');
tip.className = 'tooltip';
tip.hidden = true;
document.body.append(tip);

function showTip(handler, event, item, value) {
  tip.hidden = !value;
  if (!value) return;
  tip.textContent = value;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

function tell(view) {
  for (const name of view.takes) view.signal(name, signals[name]);
  view.runAsync();
}

async function enliven(figure) {
  const spec = JSON.parse(figure.querySelector('script').textContent), holder = document.createElement('div');
  holder.ariaHidden = 'true';  // the picture has a name, and its numbers a table
  const options = {ast: true, renderer: 'svg', actions: false, defaultStyle: false, tooltip: showTip};
  const {view} = await vegaEmbed(holder, spec, options);
  view.takes = (spec.params ?? []).map(parameter => parameter.name).filter(name => name in signals);
  view.addEventListener('pointerover', (event, item) => mark(item?.datum?.row ?? ''));
  view.addEventListener('click', (event, item) => showRow(item?.datum?.row));
  views.set(figure, view);
  tell(view);
  figure.querySelector('.picture').replaceChildren(holder);
  figure.dataset.live = '';
}

function showRow(key) {
  const row = key && document.querySelector(`#comparison-table tr[data-row="${CSS.escape(key)}"]`);
  if (row) row.scrollIntoView({block: 'center'});
}

const seen = new IntersectionObserver(entries => {
  for (const {isIntersecting, target} of entries) if (isIntersecting) { seen.unobserve(target); enliven(target); }
}, {rootMargin: '300px'});
for (const figure of document.querySelectorAll('figure:has(> script)')) seen.observe(figure);

function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  const details = target?.closest('details');
  if (details) { details.open = true; target.scrollIntoView(); }
}

window.addEventListener('hashchange', reveal);
filter();
reveal();
"""


NOTICE = """/* Vega, Vega-Lite, Vega-Embed: Copyright University of Washington Interactive Data Lab and contributors.
BSD 3-Clause License: github.com/vega/vega/blob/main/LICENSE */
"""


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets ``vegaEmbed``, from vl-convert's own copy.

    Bundling takes seconds, so the script is kept in kvbench's cache folder.
    """
    import vl_convert

    kept = cache_dir() / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    announce("bundling Vega")
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with suppress(ResultError):  # a cache that cannot be written costs time later, not the report now
        write_text_atomically(kept, script)
    return script


def scripts() -> list[str]:
    """The page's scripts, in order."""
    return [NOTICE + vega(), SCRIPT]
