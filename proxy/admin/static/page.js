// The page works without this script. It adds: refresh in place, filters while typing, keys, and a switch of colours.
"use strict";

const REFRESH_MS = 10000;
const ANSWER_MS = 20000;
const TYPING_MS = 180;
const root = document.documentElement;

function stored(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}
function store(name, value) {
  try { localStorage.setItem(name, value); } catch { /* private windows may refuse */ }
}

// Colours
const chosen = stored("theme");
if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
const theme = document.querySelector(".theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  store("theme", root.dataset.theme);
});

// Tells that the page is older than it should be.
function complain(reason) {
  document.querySelector(".stale")?.remove();
  if (!reason) return;
  const banner = document.createElement("p");
  banner.className = "banner bad stale";
  banner.setAttribute("role", "status");
  const time = document.querySelector("footer time")?.textContent;
  banner.textContent = time ? `${reason} The page shows what was known at ${time}.` : reason;
  document.querySelector("main").prepend(banner);
}

const reasonOf = (status) =>
  status === 0 ? "The proxy does not answer."
    : status === 401 ? "The admin port asks for other credentials. Load the page again to enter them."
      : `The proxy answers with the status ${status}.`;

// Refresh in place. Only the newest answer counts.
let asked = 0;
let answered = 0;
async function load(url, selectors) {
  const number = ++asked;
  let text;
  let status = 0;
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(ANSWER_MS) });
    status = answer.status;
    text = await answer.text();
  } catch { text = ""; }
  answered += 1;
  if (number !== asked) return;
  const fresh = new DOMParser().parseFromString(text, "text/html");
  complain(status === 200 ? "" : fresh.querySelector("main .empty")?.textContent.trim() || reasonOf(status));
  if (status !== 200) return;
  const open = [...document.querySelectorAll("details[open][id]")].map((each) => each.id);
  const at = rowIndex();
  for (const selector of selectors) {
    const old = document.querySelector(selector), next = fresh.querySelector(selector);
    if (old && next) old.replaceWith(next);
  }
  open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
  if (at >= 0) select(at, false);
}
const isLive = () => document.querySelector("main[data-live]");
setInterval(() => {
  const isSelecting = String(getSelection()) !== "";
  const isWaiting = answered < asked;  // another question would let an answer that takes long never count
  if (!isLive() || document.hidden || isSelecting || isWaiting) return;
  const hasForm = document.querySelector("form[action]");
  load(location.href, hasForm ? [".whole", "#list", ".count", "footer"] : ["main", "footer"]);
}, REFRESH_MS);

// Filter while typing: the server filters the list of topics, the script filters the rows of a page that has them all.
const form = document.querySelector("form[action]");
if (form) {
  let timer = 0;
  const submit = () => {
    const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    const url = `${form.getAttribute("action")}?${query}`;
    history.replaceState(null, "", url);
    load(url, ["#list", ".count"]);
  };
  form.querySelector("button").hidden = true;
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(submit, TYPING_MS); });
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
}
const rowsFilter = document.querySelector("input[data-rows]");
if (rowsFilter) {
  const only = document.querySelector("input[data-only]");
  const apply = () => {
    const wanted = rowsFilter.value.trim().toLowerCase();
    let shown = 0;
    for (const row of document.querySelectorAll(".rows tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted) || (only.checked && row.dataset.source === "default");
      shown += row.hidden ? 0 : 1;
    }
    document.querySelector(".count").textContent = `${shown} shown`;
  };
  rowsFilter.form.addEventListener("input", apply);
  rowsFilter.form.addEventListener("submit", (event) => event.preventDefault());
}

// Keys
const rows = () => [...document.querySelectorAll(".rows tbody tr")].filter((row) => !row.hidden);
const rowIndex = () => rows().findIndex((row) => row.classList.contains("at"));
function select(index, scrolls = true) {
  const all = rows();
  if (!all.length) return;
  document.querySelector("tr.at")?.classList.remove("at");
  const row = all[Math.max(0, Math.min(index, all.length - 1))];
  row.classList.add("at");
  if (scrolls) row.scrollIntoView({ block: "nearest" });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && isTyping) { event.target.blur(); return; }
  if (isTyping) return;
  switch (event.key) {
    case "/": {
      const search = document.querySelector("input[type=search]");
      if (search) { event.preventDefault(); search.focus(); search.select(); }
      break;
    }
    case "j": select(rowIndex() + 1); break;
    case "k": select(rowIndex() < 0 ? 0 : rowIndex() - 1); break;
    case "Enter": {
      const link = document.querySelector("tr.at a");
      if (link && !event.target.closest("a, button, summary")) link.click();
      break;
    }
    case "t": location.assign("/topics"); break;
    case "o": location.assign("/"); break;
  }
});
