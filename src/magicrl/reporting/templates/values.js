"use strict";
// What the drawings show, from the page's data. A chart of a comparison names its curves and takes the x of its axis.
const data = JSON.parse(document.getElementById("hover").textContent);

function along(curve, axis) {
  const x = data["#x"][curve.x[axis]];
  return { label: curve.label, color: curve.color, points: curve.y.map((y, i) => [x[i], y]) };
}

for (const chart of Object.values(data)) {
  if (!chart.curves) continue;
  chart.series = data["#curves"][chart.curves].filter((curve) => chart.axis in curve.x && !curve.alone)
    .map((curve) => along(curve, chart.axis));
}
