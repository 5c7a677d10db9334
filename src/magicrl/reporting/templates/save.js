// What a figure shows, as a file: the drawing with title and legend (SVG, PNG), its curves as a table (CSV).
(function () {
  const PNG_SCALE = 2; // of the file's own size, which is twice that of its drawing

  function download(name, uri) {
    const link = document.createElement("a");
    link.download = name;
    link.href = uri;
    link.click();
  }

  function shown(view) {
    return Array.from(view.querySelectorAll("svg.chart")).find((svg) => !svg.hasAttribute("hidden"));
  }

  function drawing(view) {
    const file = view.querySelector("template").content.querySelector("svg").cloneNode(true);
    const body = shown(view).cloneNode(true);
    for (const cross of body.querySelectorAll(".cross")) cross.remove();
    file.querySelector("style").textContent = data["#style"];
    file.querySelector("title").textContent = shown(view).getAttribute("aria-label");
    file.querySelector("g").prepend(...body.childNodes);
    return new XMLSerializer().serializeToString(file);
  }

  const uri = (type, text) => "data:" + type + ";charset=utf-8," + encodeURIComponent(text);

  function savePng(name, svg) {
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = document.createElement("canvas");
      canvas.width = image.width * PNG_SCALE;
      canvas.height = image.height * PNG_SCALE;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      download(name, canvas.toDataURL("image/png"));
    });
    image.src = uri("image/svg+xml", svg);
  }

  const quoted = (cell) => (/[",\n]/.test(cell) ? '"' + cell.replaceAll('"', '""') + '"' : cell);

  function table(curves) {
    const axes = Object.entries(data["#axes"]);
    const rows = [["variant", ...axes.map((axis) => axis[1]), "mean", "smallest", "largest", "runs"]];
    for (const curve of curves) {
      curve.y.forEach((y, i) => {
        const where = axes.map(([axis]) => (axis in curve.x ? data["#x"][curve.x[axis]][i] : ""));
        rows.push([curve.label, ...where, y, curve.low ? curve.low[i] : y, curve.high ? curve.high[i] : y, curve.runs]);
      });
    }
    return rows.map((row) => row.map((cell) => quoted(String(cell))).join(",") + "\n").join("");
  }

  for (const button of document.querySelectorAll("[data-save]")) {
    const view = button.closest(".view"), name = view.dataset.name + "." + button.dataset.save;
    button.hidden = false;
    button.addEventListener("click", () => {
      if (button.dataset.save === "csv") download(name, uri("text/csv", table(data["#curves"][view.dataset.name])));
      else if (button.dataset.save === "svg") download(name, uri("image/svg+xml", drawing(view)));
      else savePng(name, drawing(view));
    });
  }
})();
