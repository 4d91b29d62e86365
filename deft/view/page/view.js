// The page of the live view: asks the server for what changed, every POLL milliseconds while the page is visible.
"use strict";

const POLL = 2000, RETRY = 5000, CHART_HEIGHT = 190;
const STATES = {
  running: ["training", "good"], complete: ["finished", "good"], stopped: ["stopped", ""], failed: ["failed", "bad"],
  killed: ["killed", "bad"], removed: ["removed", "bad"], unknown: ["not running", ""],
};
const find = (id) => document.getElementById(id);
const charts = new Map();  // title -> {plot, box, key}
let failures = 0, isPicked = false, chosen = null, seen = "", hasEnded = false, lastNotice = "", shownTiles = null, shownMedia = "", shownRuns = "", followsLog = true;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
  const days = Math.floor(whole / 86400), rest = whole % 86400;
  const text = `${Math.floor(rest / 3600)}:${two(Math.floor(rest / 60) % 60)}:${two(rest % 60)}`;
  return days ? `${days} d ${text}` : text;
}

function short(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${+(value / (letter === "k" ? 1e3 : limit)).toPrecision(3)}${letter}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(4));
}

const share = (fraction) => `${100 * Math.min(1, fraction)}%`;
const percent = (fraction) => `${(100 * fraction).toFixed(0)} %`;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// -- charts ----------------------------------------------------------------------------------------------------------

function options(panel, unit, width) {
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif" };
  const series = panel.series.map((one, index) => {
    const isSparse = one.label === "evaluation" || one.steps.length < 3;
    return { label: one.label, stroke: color(`--c${index % 6}`), width: 1.75, spanGaps: true,
      points: { show: isSparse, size: 6, fill: color(`--c${index % 6}`) }, value: (_, v) => short(v) };
  });
  const y = panel.range ? { range: [-0.02, 1.02] } : { range: (_, low, high) => padded(low, high) };
  return {
    width, height: CHART_HEIGHT, cursor: { y: false },
    hooks: { draw: [later], ready: [(plot) => plot.over.addEventListener("mouseleave", () => later(plot))] },
    scales: { x: { time: false, range: (_, low, high) => low === high ? padded(low, high) : [low, high] }, y },
    axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map(short) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
    series: [{ label: unit, value: (_, v) => short(v) }, ...series],
  };
}

function padded(low, high) {
  if (low == null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function draw(panel, unit) {
  const parent = find(panel.more ? "others" : "charts");
  const key = [unit, ...panel.series.map((one) => one.label + (one.steps.length < 3))].join("|");
  let chart = charts.get(panel.title);
  const table = uPlot.join(panel.series.map((one) => [one.steps, one.values]));
  if (chart && chart.key !== key) {
    chart.plot.destroy();
    chart.plot = null;
  }
  if (!chart) {
    const box = element("div", undefined, "chart");
    box.append(element("h3", panel.title));
    parent.append(box);
    chart = { box, plot: null };
    charts.set(panel.title, chart);
  }
  chart.panel = panel;
  chart.unit = unit;
  chart.key = key;
  if (chart.plot) chart.plot.setData(table);
  else if (!panel.more || find("more").open) chart.plot = new uPlot(options(panel, unit, chart.box.clientWidth), table, chart.box);
}

// Show the latest values in the legend while the pointer is elsewhere; uPlot empties it after it has drawn.
function later(plot) {
  setTimeout(() => {
    if (plot.cursor.left >= 0 && plot.over.matches(":hover")) return;
    plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((value) => value != null)) });
  });
}

function forgetCharts() {
  for (const chart of charts.values()) {
    if (chart.plot) chart.plot.destroy();
    chart.box.remove();
  }
  charts.clear();
}

function redraw() {  // other colours
  for (const chart of charts.values()) {
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
    draw(chart.panel, chart.unit);
  }
}

function showCharts(panels, unit) {
  const titles = new Set(panels.map((panel) => panel.title));
  if ([...charts.keys()].some((title) => !titles.has(title))) forgetCharts();  // the run began anew
  find("learning").hidden = !panels.some((panel) => !panel.more);
  find("more").hidden = !panels.some((panel) => panel.more);
  find("empty").hidden = panels.length > 0;
  for (const panel of panels) draw(panel, unit);
}

// -- the rest of the page --------------------------------------------------------------------------------------------

function showFacts(run) {
  const facts = [];
  const add = (name, value) => facts.push([name, value]);
  const hasTotal = run.total != null && run.total > 0;
  find("progress").hidden = false;
  find("bar").parentElement.hidden = !hasTotal;
  find("bar").style.width = share(hasTotal ? run.step / run.total : 0);
  add(hasTotal ? `of ${short(run.total)} ${run.unit}` : run.unit, short(run.step));
  if (run.left != null) add("left", clock(run.left));
  if (run.elapsed != null) add("elapsed", clock(run.elapsed));
  if (run.rate != null) add(`${run.unit}/s`, short(run.rate));
  if (run.episodes) add("episodes", short(run.episodes));
  if (run.mean_reward != null) add("return", short(run.mean_reward));
  if (run.success_rate != null) add("success", percent(run.success_rate));
  const found = run.evaluation;
  if (found.success_rate != null) add(`success, evaluation at ${short(found.step)}`, percent(found.success_rate));
  else if (found.mean_reward != null) add(`return, evaluation at ${short(found.step)}`, short(found.mean_reward));
  if (run.evaluating) add("episodes evaluated", `${run.evaluating[0]} of ${run.evaluating[1]}`);
  find("facts").replaceChildren(...facts.map(([name, value]) => {
    const card = element("div");
    card.append(element("b", value), element("span", name));
    return card;
  }));
}

function showTasks(tasks) {
  find("success").hidden = !tasks.length;
  find("tasks").replaceChildren(...tasks.flatMap((task) => {
    const track = element("div", undefined, "track"), bar = element("div");
    bar.style.width = share(task.success_rate);
    track.append(bar);
    const count = element("span", ` of the last ${task.episodes}`, "count"), value = element("span");
    value.append(percent(task.success_rate), count);
    return [element("span", task.task), track, value];
  }));
}

async function showTiles(tiles, isRunning) {
  find("cameras").hidden = !tiles;
  if (!tiles || shownTiles === tiles.time) return;
  const answer = await fetch(`tiles.jpg?run=${encodeURIComponent(chosen)}`, { cache: "no-store" });
  if (!answer.ok) return;
  const image = await createImageBitmap(await answer.blob());
  shownTiles = tiles.time;
  find("cameras").querySelector("h2").textContent =
    isRunning ? "Cameras of running environments" : "Cameras, the last images";
  const count = Math.max(...tiles.cameras.map((camera) => camera.count));
  const figures = [];
  for (let index = 0; index < count; index++) {
    const figure = element("figure");
    for (const camera of tiles.cameras) {
      if (index >= camera.count) continue;
      const canvas = element("canvas", undefined, "tile"), { width, height, top } = camera;
      canvas.width = width;
      canvas.height = height;
      canvas.title = camera.name;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `environment ${index}, camera ${camera.name}`);
      canvas.getContext("2d").drawImage(image, index * width, top, width, height, 0, 0, width, height);
      figure.append(canvas);
    }
    const text = tiles.texts[index];
    figure.append(element("figcaption", text ? `${index}: ${text}` : `environment ${index}`));
    figures.push(figure);
  }
  find("tiles").replaceChildren(...figures);
}

function showMedia(media) {
  const key = JSON.stringify([chosen, media]);
  if (key === shownMedia) return;  // a video that plays is left alone
  shownMedia = key;
  const parts = { samples: [], videos: [] };
  for (const { folder, name, time } of media) {
    const figure = element("figure"), shown = element(folder === "videos" ? "video" : "img");
    shown.src = `media/${folder}/${encodeURIComponent(name)}?run=${encodeURIComponent(chosen)}&t=${time}`;
    if (folder === "videos") Object.assign(shown, { controls: true, loop: true, muted: true, playsInline: true });
    else shown.alt = name;
    figure.append(shown, element("figcaption", `${folder}/${name}`));
    parts[folder].push(figure);
  }
  find("samples").replaceChildren(...parts.samples);
  find("videos").replaceChildren(...parts.videos);
  find("predictions").hidden = !parts.samples.length;
  find("recordings").hidden = !parts.videos.length;
}

function showLog(lines) {
  const log = find("log");
  find("logs").hidden = !lines.length;
  log.textContent = lines.join("\n");
  if (followsLog) log.scrollTop = log.scrollHeight;
}

function showRuns(names) {
  find("choice").hidden = names.length < 2;
  const sorted = [...names].sort(), key = sorted.join("/");
  if (key !== shownRuns) {
    find("runs").replaceChildren(...sorted.map((name) => {
      const option = element("option", name === "." ? "this folder" : name);
      option.value = name;
      return option;
    }));
  }
  shownRuns = key;
  find("runs").value = chosen;
}

function notice(text) {
  find("notice").hidden = !text;
  find("notice").textContent = text;
}

function setState(state, text) {
  const [words, kind] = STATES[state] || STATES.unknown;
  find("state").textContent = text || words;
  find("state").className = `badge ${kind}`;
}

async function show(run) {
  document.title = `${run.name} · Deft`;
  find("name").textContent = run.name;
  setState(run.state, run.evaluating ? "evaluating" : "");
  showRuns(run.runs);
  offerTakeover(run.controls || null, chosen);
  if (run.state === "removed") {
    notice("The run directory was removed. The page shows what was read before.");
    return;
  }
  const reasons = { failed: run.reason, stopped: run.reason && `Stopped by ${run.reason}; --resume continues the run.`,
    killed: "The process of the training was killed; --resume continues from the last checkpoint." };
  const unreadable = run.unreadable ? `${run.unreadable} lines of the metrics cannot be read.` : "";
  hasEnded = ["complete", "stopped", "failed"].includes(run.state);
  lastNotice = reasons[run.state] || unreadable || "";
  notice(lastNotice);
  find("about").textContent = run.about;
  showFacts(run);
  showTasks(run.tasks);
  if (run.panels) showCharts(run.panels, run.unit);
  seen = run.version;
  showMedia(run.media);
  showLog(run.log);
  await showTiles(run.tiles, run.state === "running");
}

function choose(name) {
  chosen = name;
  seen = "";
  shownTiles = null;
  forgetCharts();
  find("tiles").replaceChildren();
}

async function ask() {
  if (chosen === null) {
    const start = await (await fetch("data", { cache: "no-store" })).json();
    if (!start.runs.length) throw new Error("no run");
    choose(start.runs[0]);
  }
  const wanted = chosen;
  const answer = await fetch(`data?run=${encodeURIComponent(wanted)}&seen=${encodeURIComponent(seen)}`,
    { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.statusText);
  const run = await answer.json();
  if (wanted !== chosen) return;
  await show(run);
  // The next phase, or the next run in the folder, unless the reader picked this one.
  if (!isPicked && run.state !== "running" && run.runs.length && run.runs[0] !== chosen) choose(run.runs[0]);
}

async function poll() {
  let pause = POLL;
  if (!document.hidden) {
    try {
      await ask();
      failures = 0;
    } catch (error) {
      console.warn(error);
      failures += 1;
    }
    if (failures > 1) {  // one may be a connection that was closed while it was idle
      const again = "`deft view RUN` serves the page again, which then continues by itself.";
      if (hasEnded) {
        notice(`${lastNotice} The server of this page has ended with the training. ${again}`.trim());
      } else {
        setState("unknown", "no connection");
        notice(`The server of this page has ended, or the connection to it. ${again}`);
      }
      seen = "";
      pause = RETRY;
    }
  }
  setTimeout(poll, pause);
}

find("runs").addEventListener("change", (event) => {
  isPicked = true;
  choose(event.target.value);
  ask().catch(() => {});
});
find("log").addEventListener("scroll", () => {
  const log = find("log");
  followsLog = log.scrollTop + log.clientHeight > log.scrollHeight - 20;
});
find("more").addEventListener("toggle", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(() => {
  for (const { plot, box } of charts.values()) {
    if (plot && box.clientWidth) plot.setSize({ width: box.clientWidth, height: CHART_HEIGHT });
  }
}).observe(find("learning"));
poll();
