"""How a report looks, in light and in dark, on a screen and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1c2128; --soft: #5b6470; --line: #dfe3e8;
  --grid: #e3e6ea; --grey: #767e88;
  --blue: #2166ac; --orange: #c8553d; --green: #2f8f5b; --purple: #7b61b3;
  --good: #1f7a48; --unknown: #5b6470; --look: #9a6700; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1d2127; --ink: #e4e7eb; --soft: #a0a8b3; --line: #343a43;
    --grid: #343a43; --grey: #8d96a1;
    --blue: #6cb0f0; --orange: #ef8d76; --green: #63c391; --purple: #b49aea;
    --good: #63c391; --unknown: #a0a8b3; --look: #e3b341; --bad: #ff7b72;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2rem 1.25rem 3rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .5rem 0; max-width: 80ch; }
.soft, figcaption { color: var(--soft); font-size: .87rem; }
.head { display: flex; flex-wrap: wrap; gap: .4rem .9rem; align-items: center; }
.badge {
  padding: .12rem .7rem; border: 1px solid currentColor; border-radius: 1rem;
  font-size: .9rem; font-weight: 600;
}
.good { color: var(--good); } .unknown { color: var(--unknown); }
.look { color: var(--look); } .bad { color: var(--bad); }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .9rem 1.1rem; margin: 0;
}
.tiles {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: .7rem;
  margin: 1.2rem 0;
}
.tile { padding: .7rem .7rem; }
.tile b { display: block; font-size: 1.1rem; line-height: 1.3; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: .87rem; }
.pictures {
  display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 470px), 1fr));
}
.pictures svg { display: block; width: 100%; height: auto; margin: .4rem 0; color: var(--ink); }
.pictures svg text { font-family: inherit !important; }
ul.findings { list-style: none; padding: .6rem 1.1rem; }
ul.findings li { display: flex; gap: .7rem; padding: .25rem 0; }
ul.findings b { flex: 0 0 5.2rem; font-size: .87rem; line-height: 1.7; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
th.number { white-space: normal; vertical-align: bottom; }
td { overflow-wrap: break-word; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
code, .name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .87em; }
.name { white-space: nowrap; }
@media print { body { background: none; padding: 0; } .card { break-inside: avoid; } }
"""
