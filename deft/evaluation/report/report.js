// The values of a chart under the pointer: read from its paths, whose scales are data-box and data-range.
"use strict";
for (const chart of document.querySelectorAll("svg.chart[data-box]")) {
  const [left, top, right, bottom] = chart.dataset.box.split(" ").map(Number);
  const [x0, x1, y0, y1] = chart.dataset.range.split(" ").map(Number);
  const inner = chart.querySelector("svg");
  const figure = chart.parentElement;
  const lines = [...inner.querySelectorAll("path.line")].map((path) => ({
    name: path.dataset.name,
    color: path.classList[1],
    points: path.getAttribute("d").slice(2).split(" L ").map((pair) => pair.split(" ").map(Number)),
  }));
  const number = (value) => String(Number(value.toPrecision(4)));
  let tip = null;
  let rule = null;
  const hide = () => {
    tip?.remove();
    rule?.remove();
    tip = rule = null;
  };
  const show = (event) => {
    const box = chart.getBoundingClientRect();
    const scale = box.width / chart.viewBox.baseVal.width;
    const at = (event.clientX - box.left) / scale;
    if (at < left - 6 || at > right + 6) {
      hide();
      return;
    }
    const near = lines.map((line) => line.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)));
    const x = near.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))[0];
    if (!tip) {
      tip = document.createElement("div");
      tip.className = "tip";
      figure.append(tip);
      rule = document.createElementNS("http://www.w3.org/2000/svg", "path");
      rule.setAttribute("class", "rule");
      inner.append(rule);
    }
    const step = document.createElement("div");
    step.textContent = Math.round(x0 + ((x - left) / (right - left)) * (x1 - x0)).toLocaleString("en");
    const rows = lines.map((line, index) => {
      const row = document.createElement("div");
      row.className = line.color;
      const value = y0 + ((bottom - near[index][1]) / (bottom - top)) * (y1 - y0);
      row.textContent = (lines.length > 1 ? line.name + " " : "") + number(value);
      return row;
    });
    tip.replaceChildren(step, ...rows);
    rule.setAttribute("d", `M ${x} ${top} L ${x} ${bottom}`);
    const own = figure.getBoundingClientRect();
    const place = box.left - own.left + x * scale;
    const isRight = place > own.width / 2;
    tip.style.left = isRight ? "" : `${place + 10}px`;
    tip.style.right = isRight ? `${own.width - place + 10}px` : "";
    tip.style.top = `${box.top - own.top + 4}px`;
  };
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerdown", show);
  chart.addEventListener("pointerleave", hide);
}
