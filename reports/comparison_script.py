"""The script of a comparison: it sorts tables, filters rows, and ties a row to its marks in the figures.

The page is complete without it. Nothing is fetched, stored or built from text: it only sets classes, attributes and the
order of rows that are already there. ``[data-row]`` is whatever belongs to a row of the first table: table rows,
marks, lines, maps. The page's policy allows this very text by its SHA-256, and no other script.
"""

import base64
import hashlib

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
  for (const figure of document.querySelectorAll('figure')) {
    const own = figure.querySelectorAll('[data-row]');
    figure.classList.toggle('filtered', own.length > 0 && Array.from(own).every(e => e.matches('.filtered')));
  }
  count.textContent = `${shown.size} of ${facts.size} rows`;
}

search.addEventListener('input', filter);
for (const control of [...choices, baselines]) control.addEventListener('change', filter);

function mark(event) {
  const key = event.target.closest('[data-row]')?.dataset.row;
  for (const element of document.querySelectorAll('.marked')) element.classList.remove('marked');
  if (key) for (const element of document.querySelectorAll(`[data-row="${CSS.escape(key)}"]`))
    element.classList.add('marked');
}

document.addEventListener('pointerover', mark);
document.addEventListener('focusin', mark);

function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  const details = target?.closest('details');
  if (details) { details.open = true; target.scrollIntoView(); }
}

window.addEventListener('hashchange', reveal);
filter();
reveal();
"""


def script_source() -> str:
    """The policy's ``script-src`` that allows :data:`SCRIPT`."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
