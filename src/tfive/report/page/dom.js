"use strict";
// Elements, numbers as text, and the meaning of a name on hover or focus. Data only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";
const MINUS = "\u2212";
const DASH = "\u2013";

function el(tag, settings = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "role" && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  put(node, children);
  return node;
}

function svg(tag, settings = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(settings)) node.setAttribute(name, String(value));
  put(node, children);
  return node;
}

function put(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function fill(node, ...children) {
  node.replaceChildren();
  put(node, children);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function signed(value, digits) {
  if (!isNumber(value)) return DASH;
  const places = digits ?? (Math.abs(value) < 0.02 ? 4 : 3);
  const text = Math.abs(value).toFixed(places);
  if (Number(text) === 0) return text;
  return (value < 0 ? MINUS : "+") + text;
}

function signedLike(value) {
  return (other) => signed(other, Math.abs(value) < 0.02 ? 4 : 3);
}

function plain(value, digits = 3) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e15) text = size.toLocaleString("en");
  else if (size !== 0 && (size < 1e-3 || size >= 1e6)) text = size.toExponential(2);
  else text = size >= 1000 ? Math.round(size).toLocaleString("en") : size.toFixed(digits);
  return (value < 0 ? MINUS : "") + text;
}

function fixed(value, digits = 2) {
  return isNumber(value)
    ? `${value < 0 && Number(value.toFixed(digits)) !== 0 ? MINUS : ""}${Math.abs(value).toFixed(digits)}`
    : DASH;
}

function percent(value) {
  return isNumber(value) ? `${Math.round(value * 100)} %` : DASH;
}

function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 90) return `${plain(seconds, seconds < 10 ? 2 : 1)} s`;
  if (seconds < 5400) return `${plain(seconds / 60, 1)} min`;
  return `${plain(seconds / 3600, 1)} h`;
}

function count(number, one, many = `${one}s`) {
  return `${plain(number)} ${number === 1 ? one : many}`;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function announce(text) {
  document.getElementById("announcer").textContent = text;
}

// Tokens as people can read them: a break is shown where a token holds nothing else, and directions do not leak out.
function readable(token) {
  if (token === "") return "\u2205";
  if (/^[\r\n]+$/.test(token)) return "\u23ce";
  if (/^\t+$/.test(token)) return "\u21e5";
  if (/^ +$/.test(token)) return "\u2423";
  return token.replace(/[\r\n]+/g, "\u23ce");
}

function oneLine(text) {
  return text.trim().replace(/[\r\n]+/g, "\u23ce");
}

function table(head, rows, settings = {}) {
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": settings.label ?? "Table" },
    el(
      "table",
      { class: settings.class ?? "" },
      settings.label && el("caption", { class: "unseen" }, settings.label),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          head.map((cell) => el("th", { scope: "col" }, cell)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((cell, column) => (column === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell))),
          ),
        ),
      ),
    ),
  );
}

// Text in which back-quotes mark code, as the documentation writes it.
function coded(text) {
  return String(text)
    .split("`")
    .map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

// One of several, as a row of radio buttons that look like chips: [{id, title}].
function chooser(label, name, options, chosen, choose) {
  return el(
    "fieldset",
    { class: "chips" },
    el("legend", {}, label),
    options.map((option) =>
      el(
        "label",
        { class: "chip" },
        el("input", {
          type: "radio",
          name,
          value: option.id,
          checked: option.id === chosen,
          onchange: () => choose(option.id),
        }),
        el("span", {}, option.title),
      ),
    ),
  );
}

function picker(label, options, chosen, choose) {
  const select = el(
    "select",
    { onchange: () => choose(select.value) },
    options.map((option) => el("option", { value: option.id, selected: option.id === chosen }, option.title)),
  );
  return el("label", { class: "field" }, el("span", {}, label), select);
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
}
