// The filters of rollouts and of responses, and what paper needs.
(function () {
  for (const filters of document.querySelectorAll(".filters")) filters.hidden = false;

  const holds = (item, text) => item.textContent.toLowerCase().includes(text.toLowerCase());

  // Rollouts: by step, verdict and text.
  const rollouts = document.querySelector(".rollout-filters");
  if (rollouts) {
    const chosen = (name) => rollouts.querySelector("[data-filter=" + name + "]").value;
    rollouts.addEventListener("input", () => {
      const kind = chosen("outcome");
      let shown = 0;
      for (const step of document.querySelectorAll(".step")) {
        let inside = 0;
        for (const item of step.querySelectorAll(".rollout")) {
          const right = !kind || item.dataset.outcome === kind;
          const here = !chosen("step") || step.dataset.step === chosen("step");
          item.hidden = !(right && here && holds(item, chosen("text")));
          inside += item.hidden ? 0 : 1;
        }
        step.hidden = inside === 0;
        shown += inside;
      }
      document.querySelector(".nothing").hidden = shown > 0;
    });
  }

  // Responses: by what became of a problem.
  for (const browser of document.querySelectorAll(".browser")) {
    const select = browser.querySelector("[data-filter=kind]");
    if (!select) continue;
    const items = Array.from(browser.querySelectorAll(".browsed"));
    select.addEventListener("change", () => {
      for (const item of items) item.hidden = select.value !== "" && !item.dataset.kinds.split(" ").includes(select.value);
      const shown = items.filter((item) => !item.hidden).length;
      browser.querySelector(".none-such").hidden = shown > 0;
      browser.querySelector(".found").textContent = select.value ? shown + (shown === 1 ? " problem" : " problems") + " here" : "";
    });
  }

  // On paper everything is open; afterwards it is as it was.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = Array.from(document.querySelectorAll("details:not([open]):not(.values)"));
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of closed) details.open = false; });
})();
