// The table of runs: click or press a heading to sort, type to filter, open a run's config.
// The address keeps the state: #sort=test_error&order=descending&filter=adamw
"use strict";
(() => {
  const table = document.getElementById("runs-table");
  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const heads = [...table.tHead.rows[0].cells];
  const runs = [...table.tBodies].map((body, place) => ({
    body,
    place,
    values: [...body.rows[0].cells].map((cell) => cell.dataset.value),
    text: body.rows[0].textContent.toLowerCase(),
  }));
  const state = { sort: "", order: "ascending", filter: "" };

  function compare(a, b) {
    const column = heads.findIndex((head) => head.dataset.key === state.sort);
    const [x, y] = [a.values[column], b.values[column]];
    // What is missing comes last, whichever way the rest is sorted.
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    const number = heads[column].classList.contains("number");
    const difference = number
      ? (Number(x) === Number(y) ? 0 : Number(x) - Number(y))
      : x.localeCompare(y, undefined, { numeric: true });
    return state.order === "descending" ? -difference : difference;
  }

  function show() {
    for (const head of heads) {
      if (head.dataset.key && head.dataset.key === state.sort) head.setAttribute("aria-sort", state.order);
      else head.removeAttribute("aria-sort");
    }
    const known = heads.some((head) => head.dataset.key && head.dataset.key === state.sort);
    const sorted = [...runs].sort((a, b) => (known && compare(a, b)) || a.place - b.place);
    table.append(...sorted.map((run) => run.body));
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const run of runs) {
      run.body.hidden = !words.every((word) => run.text.includes(word));
      left += !run.body.hidden;
    }
    shown.textContent = `${left} of ${runs.length} runs`;
  }

  function remember() {
    const parts = new URLSearchParams();
    if (state.sort) parts.set("sort", state.sort), parts.set("order", state.order);
    if (state.filter) parts.set("filter", state.filter);
    // A page opened from disk may not be allowed to; the table works all the same.
    try { history.replaceState(null, "", `#${parts}`); } catch { /* not remembered */ }
  }

  function recall() {
    const parts = new URLSearchParams(location.hash.slice(1));
    if (!["sort", "filter"].some((name) => parts.has(name))) return;
    state.sort = parts.get("sort") ?? "";
    state.order = parts.get("order") === "descending" ? "descending" : "ascending";
    state.filter = filter.value = parts.get("filter") ?? "";
    show();
  }

  table.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("open")) {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(open));
      document.getElementById(button.getAttribute("aria-controls")).hidden = !open;
      return;
    }
    const key = button.parentElement.dataset.key;
    state.order = state.sort === key && state.order === "ascending" ? "descending" : "ascending";
    state.sort = key;
    show();
    remember();
  });
  filter.addEventListener("input", () => {
    state.filter = filter.value;
    show();
    remember();
  });
  addEventListener("hashchange", recall);
  recall();
})();
