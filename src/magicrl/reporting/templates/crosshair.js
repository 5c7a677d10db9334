// The crosshair: one x, shown in every chart over the same x; values of the chart that is pointed at in a small box.
(function () {
  const tip = document.getElementById("tip");
  const charts = Array.from(document.querySelectorAll("svg[data-chart]"))
    .filter((svg) => data[svg.dataset.chart] && data[svg.dataset.chart].series.length);
  let at = null; // the x last chosen, shared by all charts over it
  let over = null; // what that x counts
  let keyed = null; // the chart whose box the keys opened; it has no pointer that scrolling could leave behind

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? low : high;
  }

  function written(value, unit) {
    if (unit === "percent") {
      const text = (100 * value).toFixed(1);
      return (value > 1e-6 && !Number(text) ? (100 * value).toPrecision(1) : text) + " %"; // a tiny share is not 0
    }
    const size = Math.abs(value);
    const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 4;
    const text = size > 0 && size < 1e-4 ? value.toExponential(1) : value.toFixed(digits);
    return unit === "seconds" ? text + " s" : text;
  }

  function longest(chart) {
    return chart.series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
  }

  function hide() {
    tip.hidden = true;
    keyed = null;
    for (const svg of charts) svg.querySelector(".cross").setAttribute("visibility", "hidden");
  }

  const scale = (chart, x) => (chart.log ? Math.log(x) : x);

  function share(chart, x) {
    const low = scale(chart, chart.low), high = scale(chart, chart.high);
    return Math.min(1, Math.max(0, (scale(chart, x) - low) / (high - low)));
  }

  function place(chart, x) {
    return chart.left + share(chart, x) * (chart.right - chart.left);
  }

  function value(chart, part) {
    const low = scale(chart, chart.low), found = low + part * (scale(chart, chart.high) - low);
    return chart.log ? Math.exp(found) : found;
  }

  function worded(chart, x) {
    const number = String(Number.isInteger(x) ? x : Number(x.toPrecision(3)));
    return chart.axis && chart.axis !== "steps" ? number + " " + chart.word : chart.word + " " + number;
  }

  function crosshairs(x, group) {
    for (const svg of charts) {
      const chart = data[svg.dataset.chart], line = svg.querySelector(".cross"), where = place(chart, x);
      if (chart.group !== group) { line.setAttribute("visibility", "hidden"); continue; }
      line.setAttribute("x1", where); line.setAttribute("x2", where);
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

  function values(chart, x) {
    const every = longest(chart).length;
    return chart.series.map((series) => {
      const point = series.points[nearest(series.points, x)];
      const sparse = series.points.length < every && point[0] !== x;
      const label = sparse ? series.label + " (" + worded(chart, point[0]) + ")" : series.label;
      return [label, written(point[1], chart.unit), series.color];
    });
  }

  function show(svg, x, left, top) {
    const chart = data[svg.dataset.chart], found = values(chart, x), head = document.createElement("div");
    crosshairs(x, chart.group);
    head.textContent = worded(chart, x);
    tip.replaceChildren(head, ...found.map((parts) => row(...parts)));
    tip.hidden = false;
    svg.setAttribute("aria-valuenow", x);
    svg.setAttribute("aria-valuetext", head.textContent + ": " + found.map((p) => p[0] + " " + p[1]).join(", "));
    const room = document.documentElement.clientWidth - tip.offsetWidth - 6;
    const wanted = left + 16 > room ? left - 16 - tip.offsetWidth : left + 16;
    tip.style.left = Math.max(6, Math.min(room, wanted)) + "px";
    tip.style.top = Math.max(6, Math.min(innerHeight - tip.offsetHeight - 8, top + 16)) + "px";
  }

  function pointed(svg, event) {
    const chart = data[svg.dataset.chart], box = svg.getBoundingClientRect(), points = longest(chart);
    const unit = (event.clientX - box.left) / box.width * chart.width;
    const part = Math.min(1, Math.max(0, (unit - chart.left) / (chart.right - chart.left)));
    at = points[nearest(points, value(chart, part))][0];
    over = chart.group;
    keyed = null;
    show(svg, at, event.clientX, event.clientY);
  }

  function beside(svg) {
    const chart = data[svg.dataset.chart], box = svg.getBoundingClientRect();
    show(svg, at, box.left + place(chart, at) / chart.width * box.width, box.top);
  }

  function stepped(svg, move) {
    const points = longest(data[svg.dataset.chart]);
    const group = data[svg.dataset.chart].group;
    const now = at === null || over !== group ? points.length - 1 : nearest(points, at);
    over = group;
    at = points[Math.min(points.length - 1, Math.max(0, move(now, points.length - 1)))][0];
    keyed = svg;
    beside(svg);
  }

  const moves = {
    ArrowRight: (i) => i + 1, ArrowUp: (i) => i + 1, ArrowLeft: (i) => i - 1, ArrowDown: (i) => i - 1,
    PageUp: (i, last) => i + Math.ceil(last / 10), PageDown: (i, last) => i - Math.ceil(last / 10),
    Home: () => 0, End: (i, last) => last,
  };

  for (const svg of charts) {
    const points = longest(data[svg.dataset.chart]);
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "slider");
    svg.setAttribute("aria-valuemin", points[0][0]);
    svg.setAttribute("aria-valuemax", points[points.length - 1][0]);
    svg.setAttribute("aria-valuenow", points[points.length - 1][0]);
    svg.addEventListener("pointermove", (event) => pointed(svg, event));
    svg.addEventListener("pointerdown", (event) => pointed(svg, event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { hide(); return; }
      const move = moves[event.key];
      if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      stepped(svg, move);
    });
  }
  addEventListener("pointerdown", (event) => { if (!event.target.closest("svg[data-chart]")) hide(); });
  // Focusing a chart scrolls it into view, and the browser may tell of that only after the first key.
  addEventListener("scroll", () => { if (keyed) beside(keyed); else hide(); }, { passive: true });

  // The x axis of a comparison: every figure and every switch of the page goes along.
  const switches = Array.from(document.querySelectorAll(".axes"));
  for (const set of switches) {
    set.hidden = false;
    set.addEventListener("change", (event) => {
      hide();
      for (const input of document.querySelectorAll(".axes input")) input.checked = input.value === event.target.value;
      for (const view of document.querySelectorAll(".view")) {
        const drawings = Array.from(view.querySelectorAll("svg[data-axis]"));
        const chosen = drawings.find((svg) => svg.dataset.axis === event.target.value);
        const empty = view.querySelector(".no-axis");
        if (!drawings.length) continue;
        for (const svg of drawings) svg.toggleAttribute("hidden", svg !== chosen);
        if (empty) empty.hidden = Boolean(chosen);
      }
    });
  }

  addEventListener("beforeprint", hide);
})();
