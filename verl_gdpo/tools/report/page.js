"use strict";
// Draws the charts of the page with uPlot, from the JSON in #data.
(() => {
  const FEW = 25, LONG = 200; // points of a line
  const LEAST_WIDTH = 56; // pixels of an axis, so that most charts begin at one place
  // a look is a colour and dashes: after the last colour the first comes again, with other dashes
  const DASHES = [[], [8, 4], [8, 3, 2, 3], [2, 3], [14, 4], [4, 2, 1, 2]];
  const colour = look => css(`--look-${look % 6}`);
  const dash = look => DASHES[(look + Math.floor(look / 6)) % 6];
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // four digits, as `as_text` of tables.py writes them; null is a gap, and undefined is no value
  const shown = value => (value === undefined ? "-" : value === null ? "no number" : String(Number(value.toPrecision(4))));
  const charts = JSON.parse(document.getElementById("data").textContent).map(prepared);

  function prepared(chart) {
    const figure = document.getElementById(chart.id);
    // null is a gap; undefined is a step that only another line has
    const points = uPlot.join(chart.lines.map(line => [line.x, line.y]));
    const box = figure.querySelector(".plot");
    const height = parseFloat(getComputedStyle(box).minHeight); // pixels
    return { ...chart, figure, box, height, points, isLog: false };
  }

  // the axis shows what Python asks for, which has 0 in it, so that noise stays small
  function range(chart) {
    return (plot, low, high) => {
      const bottom = Math.min(chart.axis[0], low ?? chart.axis[0]);
      const top = Math.max(chart.axis[1], high ?? chart.axis[1]);
      const room = 0.05 * (top - bottom || 1);
      return [bottom - room, top + room];
    };
  }

  // the width of the labels, so that no sign and no digit is cut off; uPlot asks again until it stays
  function widthOf(plot, labels, index, cycle) {
    const axis = plot.axes[index];
    if (cycle > 1) return axis._size;
    plot.ctx.font = axis.font[0];
    const widths = (labels ?? []).map(label => plot.ctx.measureText(label).width / devicePixelRatio);
    return Math.max(LEAST_WIDTH, Math.ceil(axis.ticks.size + axis.gap + Math.max(0, ...widths)));
  }

  function series(chart, line, index) {
    const until = chart.points[0].findLastIndex(step => step <= chart.end) + 1;
    const last = chart.points[index + 1].slice(0, until).findLast(value => value !== undefined);
    const isEdge = line.kind === "low" || line.kind === "high", isMark = line.kind === "points";
    const few = line.x.length < FEW;
    return {
      label: line.label,
      class: line.kind || null,
      value: (plot, value, number, place) => shown(place == null ? last : value),
      stroke: isEdge ? "transparent" : colour(line.look),
      width: line.x.length > LONG ? 1.2 : 2,
      dash: dash(line.look),
      paths: isMark ? () => null : undefined,
      // validation is hollow
      points: { show: isMark || (few && !isEdge), size: isMark ? 8 : 4, fill: isMark ? css("--card") : colour(line.look) },
    };
  }

  function options(chart) {
    const line = { stroke: css("--ink"), font: "12px system-ui, sans-serif" };
    const grid = { stroke: css("--rule"), width: 1 };
    const y = chart.isLog ? { distr: 3 } : { range: range(chart) };
    const edges = chart.lines.flatMap((one, i) => (one.kind === "high" ? [i + 1] : []));
    return {
      width: chart.box.clientWidth,
      height: chart.height,
      scales: { x: { time: false, range: (plot, a, b) => (a === b ? [a - 1, b + 1] : [a, b]) }, y },
      axes: [
        { ...line, grid, ticks: grid, size: 28 },
        { ...line, grid, ticks: grid, size: widthOf, values: (plot, ticks) => ticks.map(tick => (tick == null ? "" : shown(tick))) },
      ],
      series: [
        { label: "step", value: (plot, value, number, place) => (place == null ? chart.end : value) },
        ...chart.lines.map((one, i) => series(chart, one, i)),
      ],
      bands: edges.map(high => ({ series: [high, high - 1], fill: colour(chart.lines[high - 1].look) + "33" })),
      cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, hover: { prox: 12 }, drag: { y: false } },
      legend: { markers: { dash: (plot, i) => (dash(chart.lines[i - 1].look).length ? "dashed" : "solid") } },
    };
  }

  function draw(chart) {
    const scale = chart.plot?.scales.x;
    chart.plot?.destroy();
    const hidden = value => (value != null && value <= 0 ? null : value);
    const values = chart.isLog ? chart.points.slice(1).map(ys => ys.map(hidden)) : chart.points.slice(1);
    chart.plot = new uPlot(options(chart), [chart.points[0], ...values], chart.box);
    if (scale) chart.plot.setScale("x", { min: scale.min, max: scale.max });
  }

  function zoomAll(low, high) {
    for (const { plot } of charts) plot.setScale("x", { min: Math.max(low, 0), max: high });
  }

  function showAll() {
    for (const { plot, points } of charts) plot.setScale("x", { min: points[0][0], max: points[0].at(-1) });
  }

  function goTo(chart, place) {
    const { plot, points } = chart, at = Math.min(Math.max(place, 0), points[0].length - 1);
    plot.setCursor({ left: plot.valToPos(points[0][at], "x"), top: chart.height / 3 }, true, true);
    const said = chart.lines.map((line, i) => `${line.label} ${shown(plot.data[i + 1][at])}`);
    chart.figure.querySelector(".live").textContent = `step ${points[0][at]}: ${said.join(", ")}`;
  }

  function onKey(chart, event) {
    const { plot, points } = chart, { min, max } = plot.scales.x;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
    const now = plot.cursor.idx ?? points[0].length - 1;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) goTo(chart, now + moves[event.key] * (event.shiftKey ? 10 : 1));
    else if (event.key in zooms) {
      const half = (zooms[event.key] * (max - min)) / 2;
      zoomAll(points[0][now] - half, points[0][now] + half);
    } else if (event.key === "Escape") showAll();
    else return;
    event.preventDefault();
  }

  function fillTable(chart, folded) {
    if (!folded.open || folded.querySelector("table")) return;
    const scroll = folded.appendChild(document.createElement("div"));
    const table = scroll.appendChild(document.createElement("table"));
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    const addRow = (cells, name) => {
      const row = table.insertRow();
      for (const cell of cells) row.appendChild(document.createElement(name)).textContent = cell;
    };
    addRow(["step", ...chart.lines.map(line => [line.label, line.kind].filter(Boolean).join(", "))], "th");
    const [steps, ...lines] = chart.points;
    steps.forEach((step, i) => addRow([step, ...lines.map(y => (y[i] === undefined ? "" : shown(y[i])))], "td"));
  }

  for (const chart of charts) {
    draw(chart);
    chart.box.addEventListener("keydown", event => onKey(chart, event));
    const folded = chart.figure.querySelector("details"), log = chart.figure.querySelector("button");
    folded.addEventListener("toggle", () => fillTable(chart, folded));
    log.hidden = !chart.points.slice(1).some(ys => ys.some(value => value > 0));
    log.addEventListener("click", () => {
      chart.isLog = !chart.isLog;
      log.setAttribute("aria-pressed", chart.isLog);
      draw(chart);
    });
    new ResizeObserver(() => chart.plot.setSize({ width: chart.box.clientWidth, height: chart.height })).observe(chart.box);
  }

  for (const link of document.querySelectorAll("a[data-first]")) {
    link.addEventListener("click", () => {
      const first = Number(link.dataset.first), last = Number(link.dataset.last);
      const room = Math.max(5, (last - first) / 2);
      const chart = charts.find(one => `#${one.id}` === link.hash);
      zoomAll(first - room, last + room);
      // before the next frame, uPlot has drawn the zoom, and the browser has followed the link
      requestAnimationFrame(() => {
        chart.box.focus({ preventScroll: true });
        goTo(chart, chart.points[0].findIndex(step => step >= first));
      });
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));
})();
