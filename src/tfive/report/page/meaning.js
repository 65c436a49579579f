"use strict";
// What a name means: the diagnostics' own words, on hover, on focus and at a touch.

// A metric's name may carry a critic's number ("r2.1") and a group ("development.content_gain"); meanings have neither.
function meaningOf(name) {
  const bare = String(name)
    .replace(/^[a-z]+\.(?=[a-z])/, "")
    .replace(/(\.\d+)+$/, "");
  for (const candidate of [String(name), bare]) {
    if (Object.hasOwn(page.data.meanings ?? {}, candidate)) return page.data.meanings[candidate];
  }
  return null;
}

function titleOf(name) {
  const bare = String(name)
    .replace(/^[a-z]+\.(?=[a-z])/, "")
    .replace(/(\.\d+)+$/, "");
  const number = /\.(\d+)$/.exec(name);
  const title = meaningOf(name)?.title ?? bare.replaceAll("_", " ");
  return number ? `${title} ${number[1]}` : title;
}

function linesOf(meaning) {
  const lines = [
    meaning.what,
    meaning.healthy && `Healthy: ${meaning.healthy}`,
    meaning.otherwise && `If not: ${meaning.otherwise}`,
    meaning.unit && `Unit: ${meaning.unit}`,
  ];
  return lines.filter((line) => line && !/: [–-]$/.test(line));
}

// A name that explains itself: a button, so that a keyboard and a finger reach the meaning as a mouse does.
function term(name, label = titleOf(name)) {
  const meaning = meaningOf(name);
  return meaning ? explained(label, linesOf(meaning)) : el("span", {}, label);
}

function explained(label, lines) {
  const button = el("button", { class: "term", type: "button" }, label);
  const show = () => tooltip.show(button, lines);
  for (const event of ["mouseenter", "focus", "click"]) button.addEventListener(event, show);
  for (const event of ["mouseleave", "blur"]) button.addEventListener(event, () => tooltip.hide());
  return button;
}

const tooltip = {
  owner: null,
  box: () => document.getElementById("tooltip"),

  show(owner, lines) {
    const box = this.box();
    this.hide();
    this.owner = owner;
    fill(
      box,
      lines.map((line) => el("p", {}, coded(line))),
    );
    box.hidden = false;
    owner.setAttribute("aria-describedby", "tooltip");
    const place = owner.getBoundingClientRect();
    const left = clamp(place.left, 8, Math.max(8, document.documentElement.clientWidth - box.offsetWidth - 8));
    const below = place.bottom + 8;
    const above = place.top - box.offsetHeight - 8;
    box.style.left = `${left + window.scrollX}px`;
    box.style.top = `${(below + box.offsetHeight > window.innerHeight && above > 0 ? above : below) + window.scrollY}px`;
  },

  hide() {
    this.owner?.removeAttribute("aria-describedby");
    this.owner = null;
    this.box().hidden = true;
  },
};
