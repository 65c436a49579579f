"use strict";
// Reads the data, builds the sections that have any, and keeps the place when a live run's data changes.

const page = {
  data: null,
  explorer: null,
  evaluation: null,
  training: { axis: "windows", more: false },
  comparing: {},
};

async function readData() {
  const packed = atob(document.getElementById("tfive-data").textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let index = 0; index < packed.length; index++) bytes[index] = packed.charCodeAt(index);
  const unpacking = new DecompressionStream("gzip");
  const writer = unpacking.writable.getWriter();
  const written = writer.write(bytes).then(() => writer.close());
  const decoder = new TextDecoder();
  const reader = unpacking.readable.getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read())
    text += decoder.decode(part.value, { stream: true });
  await written;
  return JSON.parse(text + decoder.decode());
}

function render(data) {
  page.data = data;
  document.title = data.title;
  const main = document.getElementById("main");
  charts.forget(main);
  const explorers = (data.explorers ?? []).filter((one) => one.items.id.length && one.snapshots.length);
  page.explorer = explorers.length ? new Explorer(explorers, page.explorer?.place()) : null;
  page.evaluation = data.evaluation ? new Evaluation(data.evaluation, page.evaluation?.state) : null;
  const thoughts =
    page.explorer?.root ??
    (data.kind === "run" &&
      section(
        "thoughts",
        "Thoughts",
        absentLine(
          data,
          "explorers",
          "No thoughts were kept with this run: it has not measured any yet, or was written before they were kept.",
        ),
      ));
  if (page.explorer && data.absent?.explorers)
    page.explorer.root.querySelector("h2").after(absentLine(data, "explorers", ""));
  fill(
    main,
    storySection(data),
    thoughts,
    trainingSection(data, page.training),
    compareSection(data, page.comparing),
    page.evaluation?.root,
  );
  page.explorer?.list.paint();
  page.evaluation?.list.paint();
  drawTop(main);
  drawFoot(data);
}

const TITLES = {
  story: "Story",
  thoughts: "Thoughts",
  training: "Training",
  compare: "Compare",
  evaluation: "Evaluation",
};

function drawTop(main) {
  const sections = [...main.querySelectorAll(":scope > section")];
  const themes = ["auto", "light", "dark"];
  const theme = el("button", {
    type: "button",
    class: "theme",
    onclick: () => {
      const next = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
      setTheme(next);
      label();
    },
  });
  const label = () => {
    theme.textContent = `Theme: ${document.documentElement.dataset.theme ?? "auto"}`;
  };
  label();
  fill(
    document.getElementById("top"),
    el(
      "nav",
      { "aria-label": "Sections" },
      sections.map((one) => el("a", { href: `#${one.id}` }, TITLES[one.id] ?? one.id)),
    ),
    theme,
  );
}

function drawFoot(data) {
  fill(
    document.getElementById("foot"),
    data.files?.length > 0 &&
      el(
        "details",
        {},
        el("summary", {}, "Where the raw numbers lie"),
        el(
          "dl",
          { class: "files" },
          data.files.map((file) =>
            el("div", {}, el("dt", {}, el("code", {}, file.name)), el("dd", {}, coded(file.what ?? ""))),
          ),
        ),
      ),
    el(
      "p",
      {},
      "Written by tfive. This page makes no request and keeps nothing. Curves are drawn by uPlot 1.6 (MIT licence).",
    ),
  );
}

// Draws newer data and leaves the reader where they were: scrolled, focused, and with the cursor in the word being typed.
function redrawInPlace(data) {
  const top = window.scrollY;
  const { id, selectionStart } = document.activeElement ?? {};
  render(data);
  window.scrollTo(0, top);
  const focused = id && document.getElementById(id);
  focused?.focus?.({ preventScroll: true });
  if (focused?.type === "search") focused.setSelectionRange(selectionStart, selectionStart);
}

// A served page asks whether the run has moved on, and draws itself anew in place.
function follow(every) {
  const ask = async () => {
    try {
      const { version } = await (await fetch("version")).json();
      if (version !== page.data.version) {
        redrawInPlace(await (await fetch("data")).json());
      }
    } catch (error) {
      announce("The run’s page is no longer served; this is its last state.");
      document
        .getElementById("foot")
        .prepend(
          el(
            "p",
            { class: "failure" },
            `The run’s page is no longer served (${error.message}); this is its last state.`,
          ),
        );
      return;
    }
    if (page.data.live) setTimeout(ask, 1000 * page.data.live.every);
  };
  setTimeout(ask, 1000 * every);
}

// Curves are drawn in the colours of their theme, so a new theme draws them anew.
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  charts.redraw();
}

function openAll() {
  for (const figure of document.querySelectorAll(".later")) figure.drawLater?.();
  for (const details of document.querySelectorAll("details.limits, footer details")) details.open = true;
}

async function start() {
  render(await readData());
  if (location.hash.startsWith("#item=") && !page.explorer?.follow(location.hash))
    announce("The item of this link is not on the page.");
  else if (/^#[a-z]+$/.test(location.hash)) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  window.addEventListener("hashchange", () => page.explorer?.follow(location.hash));
  window.addEventListener("resize", () => charts.resize());
  window.addEventListener("beforeprint", () => {
    page.theme = document.documentElement.dataset.theme ?? "auto";
    openAll();
    setTheme("light");
  });
  window.addEventListener("afterprint", () => setTheme(page.theme));
  window.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tooltip.hide();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.redraw());
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
  if (page.data.live) follow(page.data.live.every);
}

start().catch((error) => {
  fill(
    document.getElementById("main"),
    el(
      "p",
      { class: "failure" },
      `This page could not be drawn: ${error.message}. A browser from 2023 or later is needed.`,
    ),
  );
  throw error;
});
