/* What Lockstep's widgets share: a frame with caption, transport, scrubber, keys and figures, and how a widget gets onto
   a page. No build step, no network: on the website a deferred script before those of the widgets, in a notebook the
   first part of an anywidget's module (see live.py). */
(() => {
const EPS = 1e-12, { min, max, abs } = Math;
const range = (n, f = i => i) => Array.from({ length: n }, (_, i) => f(i)), clamp = (x, most = 1) => max(0, min(most, x));

function make(spec, parent, attrs, text) { // "tag.class" inside parent, in the parent's namespace
  const [tag, name] = spec.split("."), svg = tag === "svg" || parent?.namespaceURI.endsWith("svg");
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (name) e.setAttribute("class", name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  parent?.append(e);
  return e;
}

function canvas(parent, W, H, attrs) { // two layers: what rests, what moves
  const box = make("div.lk-stage", parent, { style: `width:${W}px;height:${Math.ceil(H)}px` }), size = { width: W, height: H };
  return { rest: make("svg", box, { ...size, role: "img", ...attrs }), move: make("svg.lk-move", box, { ...size, "aria-hidden": true }) };
}

// # words
const color = r => `var(--r${r % 16})`;
const and = list => new Intl.ListFormat("en-GB").format(list.map(String));
const scaled = (x, units) => { let i = 0; while (x >= 999.5 && i < units.length - 1) { x /= 1000; i++; } return `${x.toPrecision(3)} ${units[i]}`; };
const seconds = s => scaled(s * 1e6, ["µs", "ms", "s"]), bytes = x => (x < 999.5 ? `${Math.round(x)} B` : scaled(x, ["B", "kB", "MB", "GB", "TB"]));

// # transport
const ICONS = { start: "M4 3h2v10H4zM13 3 7 8l6 5z", back: "M10 3 5 8l5 5z", play: "M5 3l8 5-8 5z", pause: "M4 3h3v10H4zM9 3h3v10H9z", next: "M6 3l5 5-5 5z" };

function transport(parent, state, draw) { // state: t, speed, playing, stops(), wait(), rate(to the next stop, if only so far) per second
  let frame = 0, last, until, rate;
  const still = matchMedia("(prefers-reduced-motion: reduce)"), end = () => state.stops().at(-1), near = () => 1e-9 * end(), after = () => state.stops().find(s => s > state.t + near()) ?? end();
  const icon = (b, name, words) => { b.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`; b.title = words; };
  const button = (name, words, act) => { const b = pill(parent, "", words, act); b.className = "lk-btn " + name; icon(b, name, words); return b; };
  const halt = () => { cancelAnimationFrame(frame); state.playing = false; };
  const tick = now => {
    if (!still.matches) { state.t = min(until, state.t + min(100, now - (last ?? now)) / 1000 * rate * state.speed); last = now; }
    else if (!(now - last < 900 / state.speed)) { last = now; state.t = after(); }
    if (state.t >= until - near()) { state.t = until; halt(); } else frame = requestAnimationFrame(tick);
    draw();
  };
  const run = (goal, step) => { halt(); until = goal; rate = state.rate(step); last = undefined; state.playing = true; frame = requestAnimationFrame(tick); draw(); };
  const go = t => { halt(); state.t = clamp(t, end()); draw(); };
  const step = () => run(after(), after() - state.t);
  const back = () => go(state.stops().findLast(s => s < state.t - near()) ?? 0), next = () => (state.playing || still.matches ? go(after()) : step());
  const toggle = () => { if (state.playing) return go(state.t); if (state.t >= end() - near()) state.t = 0; state.wait() ? step() : run(end()); };
  button("start", "Back to the start", () => go(0));
  button("back", "One step back", back);
  const play = button("play", "Play", toggle);
  button("next", "One step forward", next);
  return { go, back, next, toggle, halt, end, paint() { if (play.now !== state.playing) icon(play, ...((play.now = state.playing) ? ["pause", "Pause"] : ["play", "Play"])); } };
}

function scrubber(parent, control) { // the run's parts, as wide as they are long
  const box = make("div.lk-scrub", parent, { role: "slider", tabindex: 0, "aria-label": "Step", "aria-valuemin": 0 });
  let ticks, stops, snaps;
  const seek = (e, snap) => {
    const { left, width } = box.getBoundingClientRect(), t = clamp((e.clientX - left) / width) * stops.at(-1);
    control.go(snap ? stops.reduce((a, b) => (abs(b - t) < abs(a - t) ? b : a)) : t);
  };
  box.onpointerdown = e => { box.setPointerCapture(e.pointerId); seek(e); };
  box.onpointermove = e => e.buttons && seek(e);
  box.onpointerup = e => seek(e, snaps);
  return {
    build(list, phases, { snap = list.length > 2, steps = list.length - 1 } = {}) {
      stops = list;
      snaps = snap;
      ticks = list.slice(1).map((s, k) => make("div", null, { class: "lk-tick p" + phases[k], style: `flex-grow:${1e-4 + (s - list[k]) / list.at(-1)}` }));
      box.replaceChildren(...ticks);
      box.setAttribute("aria-valuemax", steps);
    },
    set(t, k, words, now = k - 1) { // now: the part to ring
      ticks.forEach((d, i) => { d.classList.toggle("now", i === now); d.style.setProperty("--done", clamp((t - stops[i]) / (stops[i + 1] - stops[i] || 1))); });
      box.setAttribute("aria-valuenow", k);
      box.setAttribute("aria-valuetext", words);
    },
  };
}

function pill(parent, text, words, act) {
  const b = make("button.lk-pill", parent, { type: "button", title: words }, text);
  b.onclick = act;
  return b;
}

// # frame
function choices(parent, { axes, runs }, choose) { // a select for each axis of the runs; returns which() run is chosen
  const at = [...runs[0].at];
  axes.forEach((axis, i) => {
    const select = make("select", make("label.lk-pill", parent, {}, axis.label + " "), { "aria-label": axis.label });
    axis.values.forEach((v, j) => make("option", select, { value: j }, v));
    select.value = at[i];
    select.onchange = () => { at[i] = +select.value; choose(); };
  });
  return () => max(0, runs.findIndex(run => run.at.every((x, i) => x === at[i])));
}

function footer(root, n) { // a row of figures: give it [value, meaning] pairs
  const foot = make("div.lk-foot", root), cells = range(n, () => { const d = make("div", foot); return [make("strong", d), make("span", d)]; });
  return pairs => pairs.forEach((pair, i) => pair.forEach((text, j) => { if (cells[i][j].textContent !== text) cells[i][j].textContent = text; }));
}

function shell(el, data, state, parts) { // what every widget has; parts: build(), draw(), turn(by)
  const root = make("div.lockstep-player", el, { role: "group", "aria-label": data.title, tabindex: 0 }), head = make("div.lk-head", root);
  make("b", head, {}, data.title);
  if (matchMedia("(prefers-color-scheme: dark)").matches && !root.closest("[data-jp-theme-light]")) root.classList.add("dark");
  const ui = { root, source: make("span", head), caption: make("p.lk-caption", root, { "aria-live": "polite" }), alert: make("p.lk-alert", root, { role: "alert", hidden: "" }), field: make("div.lk-field", root) };
  const row = make("div.lk-bar", root), control = transport(row, state, () => parts.draw());
  const scrub = scrubber(row, control), more = make("div.lk-more", row), speed = pill(more, "1×", "Speed", () => { state.speed = state.speed === 4 ? 0.5 : state.speed * 2; speed.textContent = state.speed + "×"; });
  const rebuild = () => { ui.width = ui.field.clientWidth; parts.build(); parts.draw(); };
  const watch = new ResizeObserver(() => ui.field.clientWidth && ui.field.clientWidth !== ui.width && rebuild());
  watch.observe(ui.field);
  const acts = { ArrowRight: control.next, ArrowLeft: control.back, Home: () => control.go(0), End: () => control.go(control.end()), ArrowDown: () => parts.turn(1), ArrowUp: () => parts.turn(-1) };
  root.onkeydown = e => { // keys act here and never reach the notebook around it
    e.stopPropagation();
    if (e.target.closest("select, summary") || e.altKey || e.ctrlKey || e.metaKey) return;
    const act = e.key === " " && !e.target.closest("button, [role=button]") ? control.toggle : acts[e.key];
    if (act) { e.preventDefault(); act(); }
  };
  return Object.assign(ui, { control, scrub, more, rebuild, destroy() { control.halt(); watch.disconnect(); root.remove(); } });
}

// # mounting
function define(name, widgetOf) { // widgetOf(data): the function that draws such data; in a page data-lockstep-<name> holds it
  const key = "lockstep" + name[0].toUpperCase() + name.slice(1);

  function mount(el, data, opts = {}) {
    const { root, state, control, alert, destroy } = widgetOf(data)(el, data, opts), finish = () => control.go(control.end());
    addEventListener("beforeprint", finish);
    return { root,
      step: k => control.go(state.stops()[clamp(k, state.stops().length - 1)]),
      playing: on => on !== state.playing && control.toggle(),
      error: text => { alert.textContent = text; alert.hidden = !text; },
      destroy: () => { removeEventListener("beforeprint", finish); destroy(); } };
  }

  function render({ model, el }) { // anywidget's model has the traits of a widget of book.widgets.live
    let player;
    const push = s => { if (!player) return; for (const k in s) if (model.get(k) !== s[k]) { model.set(k, s[k]); model.save_changes(); } };
    const set = name => player[name](model.get(name)), draw = () => { player?.destroy(); player = null; player = mount(el, JSON.parse(model.get("payload")), { onChange: push }); set("error"); };
    const heard = { payload: draw, error: () => set("error"), playing: () => set("playing"), step: () => model.get("step") !== +player.root.dataset.step && set("step") };
    draw();
    if (model.get("step")) set("step");
    for (const k in heard) model.on("change:" + k, heard[k]);
    return () => { for (const k in heard) model.off("change:" + k, heard[k]); player.destroy(); };
  }

  function scan(root = document) {
    for (const el of root.querySelectorAll(`[data-lockstep-${name}]:not([data-mounted])`)) {
      el.dataset.mounted = "";
      el.replaceChildren();
      mount(el, JSON.parse(el.dataset[key]));
    }
  }
  globalThis[key] = { mount, scan, render };
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", () => scan());
  else scan();
}
globalThis.lockstepControls = { EPS, range, clamp, make, canvas, color, and, seconds, bytes, pill, choices, footer, shell, define };
})();
