"""The style sheet of `report.html`: readable on a laptop, light or dark as the reader's system is."""

STYLE = """
:root { --ink: #1c2530; --soft: #5c6874; --line: #dfe4ea; --paper: #f5f7f9; --card: #ffffff;
  --c0: #2a6fbb; --c1: #e07b39; --c2: #3a9d6e; --c3: #b8478f; --c4: #7a63c4; --c5: #8c6d46; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ecf1; --soft: #9aa7b4; --line: #313b46; --paper: #12171d;
  --card: #1a2129; --c0: #5b9fe3; --c1: #f0975a; --c2: #5cc291; --c3: #d873b2; --c4: #a391e6; --c5: #bd9a6c; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header, main, footer { max-width: 1240px; margin: 0 auto; padding: 0 28px; }
header { display: flex; align-items: end; justify-content: space-between; gap: 24px; padding-top: 28px;
  flex-wrap: wrap; }
h1 { margin: 0; font-size: 26px; letter-spacing: -0.01em; }
header p { margin: 2px 0 0; } header p, footer { color: var(--soft); font-size: 13px; }
nav a { color: var(--c0); text-decoration: none; margin-left: 18px; font-size: 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 24px 24px;
  margin: 20px 0; }
h2 { margin: 0; font-size: 19px; }
.lead { margin: 2px 0 14px; color: var(--soft); max-width: 78ch; }
.cards { display: flex; flex-wrap: wrap; gap: 10px 32px; margin: 0 0 14px; }
.cards div { display: flex; flex-direction: column; }
.cards b { font-size: 19px; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 12px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 14px 22px; }
.charts + .charts, .media, .media + .charts { margin-top: 16px; }
.chart { width: 100%; height: auto; display: block; }
.media { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px 22px;
  align-items: start; }
figure { margin: 0; }
img, video { width: 100%; border-radius: 6px; display: block; background: #fff; }
video { background: #000; image-rendering: pixelated; }
figcaption { color: var(--soft); font-size: 12px; margin-top: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; align-self: start; }
th, td { text-align: right; padding: 7px 12px; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; font-size: 12.5px; }
tbody th { text-align: left; font-weight: 600; padding-left: 0; }
.split { display: grid; grid-template-columns: minmax(420px, 1.25fr) 1fr; gap: 28px; align-items: center; }
@media (max-width: 900px) { .split { grid-template-columns: 1fr; } .media { grid-template-columns: 1fr; } }
details { margin-top: 18px; } summary { cursor: pointer; color: var(--soft); font-size: 13px; margin-bottom: 10px; }
footer { padding-bottom: 32px; } code { font-size: 12px; }
"""
