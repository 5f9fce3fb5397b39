"use strict";
// Three small helps; without them every page still works: it follows the run, it filters while one
// types, and charts read out their numbers. Text reaches the page as text only: the server escapes
// it, and this file never writes markup.

const REFRESH_GAP_MS = 700;

// --- theme ---------------------------------------------------------------------------------

const themeButton = document.getElementById("theme");
const THEMES = ["auto", "light", "dark"];

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  if (themeButton) themeButton.textContent = `Theme: ${name}`;
}

function savedTheme() {
  try {
    const saved = localStorage.getItem("nestling-theme");
    return THEMES.includes(saved) ? saved : "auto";
  } catch {
    return "auto";
  }
}

setTheme(savedTheme());
if (themeButton) {
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(savedTheme()) + 1) % THEMES.length];
    try {
      localStorage.setItem("nestling-theme", next);
    } catch { /* a browser that keeps nothing */ }
    setTheme(next);
  });
}

// On a narrow screen the tabs scroll: begin with the one that is shown.
document.querySelector("nav a[aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });

// --- the page as it is now -----------------------------------------------------------------

let loading = null;
let asksAgain = false;
let served = document.getElementById("main").innerHTML;

function openDetails() {
  const found = new Map();
  for (const one of document.querySelectorAll("main details[data-key]")) found.set(one.dataset.key, one.open);
  return found;
}

function scrolled() {
  return [...document.querySelectorAll("main .scroll, main pre")].map((one) => [one.scrollLeft, one.scrollTop]);
}

function isBusy() {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && document.getElementById("main").contains(selection.anchorNode);
}

function putIn(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const main = document.getElementById("main");
  const next = fresh.getElementById("main");
  if (!next) return;
  document.title = fresh.title;
  for (const selector of ["header nav", "footer"]) {
    const old = document.querySelector(selector);
    const now = fresh.querySelector(selector);
    if (old && now && old.innerHTML !== now.innerHTML) old.replaceWith(document.adoptNode(now));
  }
  // Compared with what was served, not with what is there: opened details are no news.
  if (served === next.innerHTML) return;
  served = next.innerHTML;
  const open = openDetails();
  const pointed = [...main.querySelectorAll(".chart")].map((one) => one.dataset.at);
  const places = scrolled();
  const focused = document.activeElement;
  const focusId = focused && main.contains(focused) ? focused.id : "";
  const chartIndex = [...main.querySelectorAll(".chart")].indexOf(focused);
  const cursor = focused && "selectionStart" in focused ? focused.selectionStart : null;
  const typed = focusId && "value" in focused ? focused.value : null;
  main.replaceChildren(...[...next.childNodes].map((one) => document.adoptNode(one)));
  for (const one of main.querySelectorAll("details[data-key]")) {
    if (open.has(one.dataset.key)) one.open = open.get(one.dataset.key);
  }
  [...main.querySelectorAll(".scroll, pre")].forEach((one, index) => {
    if (places[index]) [one.scrollLeft, one.scrollTop] = places[index];
  });
  [...main.querySelectorAll(".chart")].forEach((one, index) => {
    if (pointed[index] !== undefined) point(one, Number(pointed[index]));
  });
  const again = focusId ? document.getElementById(focusId) : main.querySelectorAll(".chart")[chartIndex];
  if (again) {
    again.focus({ preventScroll: true });
    if (typed !== null && again.type === "search") {
      again.value = typed;
      if (cursor !== null) again.setSelectionRange(cursor, cursor);
    }
  }
}

async function refresh() {
  if (loading) {
    asksAgain = true;
    return;
  }
  loading = true;
  const address = location.href;
  try {
    const response = await fetch(address, { headers: { Accept: "text/html" } });
    const text = await response.text();
    if (response.ok && address === location.href) putIn(text);
  } catch {
    setLive("lost", "server gone");
  } finally {
    setTimeout(() => {
      loading = null;
      if (asksAgain) {
        asksAgain = false;
        refreshWhenFree();
      }
    }, REFRESH_GAP_MS);
  }
}

function refreshWhenFree() {
  if (!isBusy()) {
    refresh();
    return;
  }
  document.addEventListener("selectionchange", refreshWhenFree, { once: true });
}

// --- following the run ---------------------------------------------------------------------

const events = document.body.dataset.events;
let source = null;
let known = document.body.dataset.seq;

function setLive(state, text) {
  const live = document.getElementById("live");
  if (!live) return;
  live.dataset.state = state;
  live.textContent = text;
}

function follow() {
  if (!events || source) return;
  source = new EventSource(events);
  source.addEventListener("open", () => setLive("on", "live"));
  source.addEventListener("change", (event) => {
    if (event.data !== known) {
      known = event.data;
      refreshWhenFree();
    }
  });
  source.addEventListener("lost", () => {
    leave();
    setLive("lost", "run gone");
  });
  source.addEventListener("error", () => setLive("lost", "server gone"));
}

function leave() {
  if (source) source.close();
  source = null;
}

// A browser allows few open streams to one server: a hidden page does not need its own.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    leave();
    setLive("off", "paused");
  } else {
    follow();
  }
});
if (!document.hidden) follow();

// --- filters -------------------------------------------------------------------------------

let typing = 0;

document.addEventListener("input", (event) => {
  const form = event.target.closest("form[data-live]");
  if (!form) return;
  clearTimeout(typing);
  typing = setTimeout(() => {
    const given = [...new FormData(form)].filter(([, value]) => value !== "");
    const query = new URLSearchParams(given).toString();
    history.replaceState(null, "", location.pathname + (query ? `?${query}` : ""));
    refresh();
  }, event.target.type === "search" ? 200 : 0);
});

// --- charts --------------------------------------------------------------------------------

function point(chart, index) {
  const hits = [...chart.querySelectorAll(".hit")];
  const at = Math.max(0, Math.min(hits.length - 1, index));
  hits.forEach((hit, place) => hit.classList.toggle("on", place === at));
  chart.dataset.at = String(at);
  chart.querySelector(".readout").textContent = hits[at].querySelector("rect").dataset.say;
}

document.addEventListener("pointerover", (event) => {
  const hit = event.target.closest(".hit");
  if (!hit) return;
  const chart = hit.closest(".chart");
  point(chart, [...chart.querySelectorAll(".hit")].indexOf(hit));
});

document.addEventListener("keydown", (event) => {
  const chart = event.target.closest(".chart");
  if (chart && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
    const last = chart.querySelectorAll(".hit").length - 1;
    const at = Number(chart.dataset.at ?? last);
    point(chart, { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key]);
    event.preventDefault();
    return;
  }
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) {
      search.focus();
      event.preventDefault();
    }
  }
  const turns = { j: "next", k: "prev" };
  if (event.key in turns) document.querySelector(`a[rel=${turns[event.key]}]`)?.click();
});
