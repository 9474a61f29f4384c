"""The page's style sheet: one column, light or dark as the reader's system is, readable on a phone and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  --page: #f5f6f8; --card: #ffffff; --ink: #171b22; --soft: #59626f; --rule: #dfe3e9; --faint: #f0f2f5;
  --note: #fff6de; --note-rule: #e3b341; --base: #aab2bd;
  --run-1: #2459d3; --run-2: #c84a0c; --run-3: #0b7f58; --run-4: #8433c9; --run-5: #8a6a00; --run-6: #b8206b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1217; --card: #171b22; --ink: #e7eaf0; --soft: #9ca6b5; --rule: #2c333e; --faint: #1f252e;
    --note: #2b2412; --note-rule: #b58a1f; --base: #515b69;
    --run-1: #7ba6ff; --run-2: #ff9a5c; --run-3: #4fcf9d; --run-4: #c69bff; --run-5: #e2c04f; --run-6: #ff8dbd;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--font); }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 6px; overflow-wrap: anywhere; }
h1 span { display: inline-block; max-width: 100%; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 22px 0 6px; }
p { margin: 0 0 12px; max-width: 75ch; }
.soft, figcaption, .lead { color: var(--soft); }
.lead { font-size: 16px; margin-bottom: 24px; overflow-wrap: anywhere; }
.small, figcaption { font-size: 13.5px; line-height: 1.5; }
section, .run { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; }
section { padding: 22px 24px 20px; margin-top: 20px; }
section > :last-child, section > :last-child > :last-child { margin-bottom: 0; }
.runs { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); }
.run:only-child { max-width: 480px; }
.run { padding: 16px 20px 14px; border-top: 4px solid var(--colour); }
.run .name { font-weight: 650; overflow-wrap: anywhere; }
.run .figure { font-size: 38px; font-weight: 680; line-height: 1.15; letter-spacing: -0.025em; margin-top: 8px; }
.run .unit { color: var(--soft); font-size: 13.5px; margin-bottom: 12px; }
.facts { display: grid; grid-template-columns: auto 1fr; gap: 3px 12px; margin: 0; font-size: 14px; }
.facts dt { color: var(--soft); white-space: nowrap; }
.facts dd { margin: 0; text-align: right; }
.figure, .facts dd, td { font-variant-numeric: tabular-nums; }
.notes { background: var(--note); border-color: var(--note-rule); }
.notes ul { margin: 6px 0 0; padding-left: 20px; }
figure { margin: 14px 0 0; }
figcaption { margin-top: 4px; max-width: 80ch; }
svg { display: block; width: 100%; height: auto; }
svg.narrow { display: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0 0; padding: 0; list-style: none;
  font-size: 14px; }
.legend li { display: flex; align-items: center; gap: 7px; overflow-wrap: anywhere; }
.swatch { flex: none; width: 14px; height: 14px; border-radius: 4px; background: var(--colour); }
.scroll { overflow-x: auto; margin: 12px -24px 0; padding: 0 24px; }
.scroll + p { margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th, td { padding: 7px 0 7px 20px; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: baseline; }
tbody tr:last-child > * { border-bottom: 0; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
thead th { font-weight: 600; min-width: 92px; max-width: 240px; overflow-wrap: anywhere; vertical-align: bottom; }
thead span { display: inline-block; padding-bottom: 3px; border-bottom: 3px solid var(--colour); }
tbody th { font-weight: 400; color: var(--soft); min-width: 150px; }
td.text { font-family: var(--mono); font-size: 13px; overflow-wrap: anywhere; max-width: 300px; }
td small { color: var(--soft); font-size: 12.5px; }
code { font-family: var(--mono); font-size: 0.92em; overflow-wrap: anywhere; }
.bars { display: grid; grid-template-columns: minmax(80px, max-content) 1fr; gap: 9px 14px; margin: 14px 0 6px;
  font-size: 14px; }
.bars .label { overflow-wrap: anywhere; max-width: 220px; }
.bars .track { display: flex; align-items: center; gap: 9px; font-variant-numeric: tabular-nums; }
.bars .fill { height: 16px; border-radius: 4px; background: var(--colour); min-width: 2px; flex: none; }
.sample { margin-top: 14px; padding: 12px 16px; border-left: 3px solid var(--colour); background: var(--faint);
  border-radius: 0 8px 8px 0; }
.sample .text { white-space: pre-wrap; overflow-wrap: anywhere;
  font: 15px/1.6 Georgia, "Iowan Old Style", "Noto Serif", serif; }
.sample b { font-weight: 700; }
.sample .small { margin-bottom: 6px; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); font-size: 14.5px; }
footer { color: var(--soft); font-size: 13px; margin-top: 28px; }
@media (max-width: 640px) {
  main { padding: 24px 14px 48px; }
  h1 { font-size: 25px; }
  section { padding: 18px 16px 16px; }
  .scroll { margin: 12px -16px 0; padding: 0 16px; }
  svg.wide { display: none; }
  svg.narrow { display: block; }
  th, td { padding-left: 12px; }
  thead th { min-width: 76px; }
  tbody th { min-width: 112px; }
  .bars { grid-template-columns: 1fr; gap: 3px; }
  .bars .track { margin-bottom: 8px; }
}
@media print { body { background: none; } section, .run { break-inside: avoid; } }
"""
