"use strict";
// The crosshair: one step, shown in every chart at once; values of the chart under the pointer in a small box.
(function () {
  const data = JSON.parse(document.getElementById("hover").textContent);
  const tip = document.getElementById("tip");
  const charts = Array.from(document.querySelectorAll("svg[data-chart]"));

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
  }

  function written(value, unit) {
    if (unit === "percent") return (100 * value).toFixed(1) + " %";
    const size = Math.abs(value);
    const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 4;
    const text = size > 0 && size < 1e-4 ? value.toExponential(1) : value.toFixed(digits);
    return unit === "seconds" ? text + " s" : text;
  }

  function hide() {
    tip.hidden = true;
    for (const svg of charts) svg.querySelector(".cross").setAttribute("visibility", "hidden");
  }

  function crosshairs(x) {
    for (const svg of charts) {
      const chart = data[svg.dataset.chart], line = svg.querySelector(".cross");
      const at = chart.left + (x - chart.low) / (chart.high - chart.low) * (chart.right - chart.left);
      line.setAttribute("x1", at); line.setAttribute("x2", at);
      line.setAttribute("y1", 20); line.setAttribute("y2", chart.bottom);
      line.setAttribute("visibility", "visible");
    }
  }

  function row(label, value, color) {
    const line = document.createElement("div"), key = document.createElement("i"), number = document.createElement("b");
    key.className = "k" + color;
    number.textContent = value;
    line.append(key, document.createTextNode(label), number);
    return line;
  }

  function show(svg, event) {
    const chart = data[svg.dataset.chart], box = svg.getBoundingClientRect();
    const unitX = (event.clientX - box.left) / box.width * chart.width;
    const share = Math.min(1, Math.max(0, (unitX - chart.left) / (chart.right - chart.left)));
    const wanted = chart.low + share * (chart.high - chart.low);
    const longest = chart.series.reduce((a, b) => (b.points.length > a.points.length ? b : a));
    const x = nearest(longest.points, wanted)[0];
    crosshairs(x);
    const head = document.createElement("div");
    head.textContent = "step " + Math.round(x);
    tip.replaceChildren(head);
    for (const series of chart.series) {
      const point = nearest(series.points, x);
      const sparse = series.points.length < longest.points.length;
      const label = sparse && point[0] !== x ? series.label + " (step " + Math.round(point[0]) + ")" : series.label;
      tip.append(row(label, written(point[1], chart.unit), series.color));
    }
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 12;
    tip.style.left = Math.max(6, Math.min(room, event.clientX + 16)) + "px";
    tip.style.top = Math.max(6, Math.min(innerHeight - tip.offsetHeight - 8, event.clientY + 16)) + "px";
  }

  for (const svg of charts) {
    if (!data[svg.dataset.chart].series.length) continue;
    svg.addEventListener("pointermove", (event) => show(svg, event));
    svg.addEventListener("pointerdown", (event) => show(svg, event));
    svg.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("beforeprint", () => document.querySelectorAll("details.sample").forEach((d) => { d.open = true; }));
})();
