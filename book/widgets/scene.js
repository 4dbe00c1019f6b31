/* What Lockstep's widgets share: a frame with caption, transport, scrubber, keys and figures, the player of runs in it,
   marks that several draw, and how a widget gets onto a page. No build step, no network: on the website a deferred
   script before the others, in a notebook the first part of an anywidget's module (see registry.py).

   A widget's module of the same name writes its data, and says in its first lines what they mean. What all have:

   @typedef {object} Scene
   @property {string} title
   @property {{label: string, values: string[]}[]} axes   what the reader chooses a run by; none for one run
   @property {Run[]} runs                                 the run to open with first

   @typedef {object} Run
   @property {number[]} at          its place on each of the axes
   @property {string} source        where it comes from
   @property {Pair[]} figures       the row of figures below it
   @property {Stop[]} [stops]       its keyframes, where they are not worked out from times

   @typedef {object} Stop           what happens on the way to this stop; other fields say what changes by it
   @property {Sentence[]} say       its caption
   @property {string} phase         the colour of its part of the scrubber: "0", "1" or "2"

   @typedef {[string, string, boolean?]} Sentence         what to stress, the rest, whether something is wrong
   @typedef {[string, string]} Pair                       a value and what it means */

const { min, max, abs, ceil, floor } = Math;
const EPS = 1e-12;
const range = (n, f = i => i) => Array.from({ length: n }, (_, i) => f(i));
const clamp = (x, most = 1) => max(0, min(most, x));
const sum = (list, of = x => x) => list.reduce((all, x) => all + of(x), 0);

/** An element "tag.class" inside parent, in the parent's namespace. */
function make(spec, parent, attrs, text) {
  const [tag, name] = spec.split(".");
  const svg = tag === "svg" || parent?.namespaceURI.endsWith("svg");
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (name) e.setAttribute("class", name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  parent?.append(e);
  return e;
}

/** Two layers of a stage: what rests, what moves. */
function canvas(parent, W, H, attrs) {
  const box = make("div.lk-stage", parent, { style: `width:${W}px;height:${ceil(H)}px` });
  const size = { width: W, height: H };
  const rest = make("svg", box, { ...size, role: "img", ...attrs });
  return { rest, move: make("svg.lk-move", box, { ...size, "aria-hidden": true }) };
}

// # words
const byTouch = () => matchMedia("(pointer: coarse)").matches;
const color = r => `var(--r${r % 16})`;
const and = list => new Intl.ListFormat("en-GB").format(list.map(String));
const num = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;
const upper = text => text[0].toUpperCase() + text.slice(1);
const seconds = s => (s < EPS ? "0 s" : scaled(s * 1e6, ["µs", "ms", "s"]));
const bytes = x => (x < 999.5 ? `${Math.round(x)} B` : scaled(x, ["B", "kB", "MB", "GB", "TB"]));
/** Without trailing zeros: "2.3 ms". */
const short = s => seconds(s).replace(/(\.\d*[1-9])0+ |\.0+ /, "$1 ");

function scaled(x, units) {
  let i = 0;
  while (x >= 999.5 && i < units.length - 1) {
    x /= 1000;
    i++;
  }
  return `${x.toPrecision(3)} ${units[i]}`;
}

// # marks: rectangles are text, as many are drawn at once
function rect([x, y, w, h], rest) {
  const at = [x, y, max(0.3, w), h].map(v => v.toFixed(2));
  return `<rect x="${at[0]}" y="${at[1]}" width="${at[2]}" height="${at[3]}" ${rest}/>`;
}

/** A bar that is hatched if it is there more than once. */
function bar(box, times, rest) {
  const [x, y, w, h] = box;
  const hatch = `<path d="M${x + w / 2} ${y}v${h}" stroke-width="${w}" class="lk-hatch"/>`;
  return rect(box, rest) + (times > 1 ? hatch : "");
}

/** Slow at both ends. */
const ease = f => (f < 0.5 ? 2 * f * f : 1 - 2 * (1 - f) ** 2);

/** A rank's dot and name. */
function rankName(parent, r, y, name = `rank ${r}`) {
  make("circle", parent, { cx: 5, cy: y - 4.5, r: 4, fill: color(r) });
  make("text.lk-rank", parent, { x: 14, y }, name);
}

/** What a colour means, in a legend: a box with a mark and a class, then words. */
function swatch(parent, c, words, mark = "\u00a0", look = "i") {
  const one = make("span", parent);
  make(look, one, { style: "--c:" + c }, mark);
  one.append(words);
}

// # transport
const ICONS = {
  start: "M4 3h2v10H4zM13 3 7 8l6 5z",
  back: "M10 3 5 8l5 5z",
  play: "M5 3l8 5-8 5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M6 3l5 5-5 5z",
};

/**
 * The clock and its buttons.
 * state: t, speed, playing, stops(), wait(): whether it stops at each, rate(step) a second, to the next stop if only
 * so far
 */
function transport(parent, state, draw) {
  let frame = 0;
  let last, until, rate;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const end = () => state.stops().at(-1);
  const near = () => 1e-9 * end();
  const after = () => state.stops().find(s => s > state.t + near()) ?? end();
  const before = () => state.stops().findLast(s => s < state.t - near()) ?? 0;
  const icon = (b, name, words) => {
    b.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;
    b.title = words;
  };
  const button = (name, words, act) => {
    const b = pill(parent, "", words, act);
    b.className = "lk-btn " + name;
    icon(b, name, words);
    return b;
  };
  const halt = () => {
    cancelAnimationFrame(frame);
    state.playing = false;
  };
  const tick = now => {
    if (!still.matches) {
      state.t = min(until, state.t + (min(100, now - (last ?? now)) / 1000) * rate * state.speed);
      last = now;
    } else if (!(now - last < 900 / state.speed)) {
      last = now;
      state.t = after();
    }
    if (state.t >= until - near()) {
      state.t = until;
      halt();
    } else frame = requestAnimationFrame(tick);
    draw();
  };
  const run = (goal, step) => {
    halt();
    until = goal;
    rate = state.rate(step);
    last = undefined;
    state.playing = true;
    frame = requestAnimationFrame(tick);
    draw();
  };
  const go = t => {
    halt();
    state.t = clamp(t, end());
    draw();
  };
  const step = () => run(after(), after() - state.t);
  const back = () => go(before());
  const next = () => (state.playing || still.matches ? go(after()) : step());
  const toggle = () => {
    if (state.playing) return go(state.t);
    if (state.t >= end() - near()) state.t = 0;
    state.wait() ? step() : run(end());
  };
  button("start", "Back to the start", () => go(0));
  button("back", "One step back", back);
  const play = button("play", "Play", toggle);
  button("next", "One step forward", next);
  const paint = () => {
    if (play.now === state.playing) return;
    play.now = state.playing;
    icon(play, ...(play.now ? ["pause", "Pause"] : ["play", "Play"]));
  };
  return { go, back, next, toggle, halt, end, paint };
}

/** The run's parts, as wide as they are long. */
function scrubber(parent, control) {
  const attrs = { role: "slider", tabindex: 0, "aria-label": "Step", "aria-valuemin": 0 };
  const box = make("div.lk-scrub", parent, attrs);
  let ticks, stops, snaps;
  const seek = (e, snap) => {
    const { left, width } = box.getBoundingClientRect();
    const t = clamp((e.clientX - left) / width) * stops.at(-1);
    control.go(snap ? stops.reduce((a, b) => (abs(b - t) < abs(a - t) ? b : a)) : t);
  };
  box.onpointerdown = e => {
    box.setPointerCapture(e.pointerId);
    seek(e);
  };
  box.onpointermove = e => e.buttons && seek(e);
  box.onpointerup = e => seek(e, snaps);
  return {
    build(list, phases, { snap = list.length > 2, steps = list.length - 1 } = {}) {
      stops = list;
      snaps = snap;
      const wide = k => `flex-grow:${1e-4 + (list[k + 1] - list[k]) / list.at(-1)}`;
      ticks = range(list.length - 1, k => make("div", null, { class: "lk-tick p" + phases[k], style: wide(k) }));
      box.replaceChildren(...ticks);
      box.setAttribute("aria-valuemax", steps);
    },
    /** now: the part to ring */
    set(t, k, words, now = k - 1) {
      ticks.forEach((d, i) => {
        d.classList.toggle("now", i === now);
        d.style.setProperty("--done", clamp((t - stops[i]) / (stops[i + 1] - stops[i] || 1)));
      });
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

/** A labelled list of [value, text]. */
function choice(parent, label, name, options, chosen, act) {
  const select = make("select", make("label.lk-pill", parent, {}, label + " "), { "aria-label": name });
  for (const [value, text] of options) make("option", select, { value }, text);
  select.value = chosen;
  select.onchange = () => act(select.value);
  return select;
}

// # frame
/** A choice for each axis of the runs; returns which() run is chosen. */
function choices(parent, { axes, runs }, choose) {
  const at = [...runs[0].at];
  axes.forEach(({ label, values }, i) => {
    choice(parent, label, label, Object.entries(values), at[i], j => {
      at[i] = +j;
      choose();
    });
  });
  return () =>
    max(
      0,
      runs.findIndex(run => run.at.every((x, i) => x === at[i])),
    );
}

/** A row of figures: give it pairs. */
function footer(root, n) {
  const foot = make("div.lk-foot", root);
  const cells = range(n, () => {
    const d = make("div", foot);
    return [make("strong", d), make("span", d)];
  });
  const write = (cell, text) => {
    if (cell.textContent !== text) cell.textContent = text;
  };
  return pairs => pairs.forEach((pair, i) => pair.forEach((text, j) => write(cells[i][j], text)));
}

/** The root of a widget, its head, caption, alert and field. */
function frame(el, title, tabindex = -1) {
  const root = make("div.lockstep-player", el, { role: "group", "aria-label": title, tabindex });
  const head = make("div.lk-head", root);
  make("b", head, {}, title);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches && !root.closest("[data-jp-theme-light]");
  root.classList.toggle("dark", dark);
  const source = make("span", head);
  const caption = make("p.lk-caption", root, { "aria-live": "polite" });
  const alert = make("p.lk-alert", root, { role: "alert", hidden: "" });
  return { root, source, caption, alert };
}

/** Act on a change of the field's width. */
function watchWidth(field, act) {
  let width = 0;
  const watch = new ResizeObserver(() => {
    if (!field.clientWidth || field.clientWidth === width) return;
    width = field.clientWidth;
    act();
  });
  watch.observe(field);
  return watch;
}

/** What every widget that plays has; parts: build(), draw(), turn(by). */
function shell(el, data, state, parts) {
  const ui = frame(el, data.title, 0);
  const { root } = ui;
  const field = make("div.lk-field", root);
  const row = make("div.lk-bar", root);
  const play = make("div.lk-play", row);
  const control = transport(play, state, () => parts.draw());
  const scrub = scrubber(play, control);
  const more = make("div.lk-more", row);
  const speed = pill(play, "1×", "Speed", () => {
    state.speed = state.speed === 4 ? 0.5 : state.speed * 2;
    speed.textContent = state.speed + "×";
  });
  const rebuild = () => {
    ui.width = field.clientWidth;
    parts.build();
    parts.draw();
  };
  const watch = watchWidth(field, () => field.clientWidth !== ui.width && rebuild());
  const acts = {
    ArrowRight: control.next,
    ArrowLeft: control.back,
    Home: () => control.go(0),
    End: () => control.go(control.end()),
    ArrowDown: () => parts.turn(1),
    ArrowUp: () => parts.turn(-1),
  };
  // Keys act here and never reach the notebook around it.
  root.onkeydown = e => {
    e.stopPropagation();
    if (e.target.closest("select, summary") || e.altKey || e.ctrlKey || e.metaKey) return;
    const act = e.key === " " && !e.target.closest("button, [role=button]") ? control.toggle : acts[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  };
  const destroy = () => {
    control.halt();
    watch.disconnect();
    root.remove();
  };
  return Object.assign(ui, { field, control, scrub, more, rebuild, destroy });
}

/** Write sentences into a caption. */
function write(caption, sentences) {
  const parts = sentences.flatMap(([stress, rest, wrong]) => {
    return [make("b", null, wrong ? { class: "lk-wrong" } : {}, stress), rest];
  });
  caption.replaceChildren(...parts);
}

/** Give a caption the room of the longest of these, so that nothing below it moves. */
function reserve(caption, texts) {
  caption.style.minHeight = "";
  const heights = texts.map(sentences => {
    write(caption, sentences);
    return caption.clientHeight;
  });
  caption.style.minHeight = max(...heights) + "px";
}

const plain = sentences => sentences.map(([stress, rest]) => stress + rest).join("");
const longest = (texts, n) => texts.sort((a, b) => plain(b).length - plain(a).length).slice(0, n);

/**
 * Mount the player of a scene. What a kind of scene provides:
 *   start(view)              what it adds to the frame, once
 *   decode(raw, data)        a run, ready to draw: times (of its stops), and what the others need
 *   stage(view)              draws the run of the view into its field; returns what paints a moment
 *   tell(view, k)            the sentences of stop k;   captions(view): all that may be told
 *   figures(view)            the pairs of the row of figures now;   numFigures: how many, 5 if not said
 *   words(view, k)           what the slider says
 *   parts(run)               of the scrubber: [times, phases, options]
 *   rate(step)               stops, or ticks, a second
 *   resume(view, before)     where the clock stands in another run
 *   turn(view, by)           the keys up and down;   after(view, k): what else is to be drawn
 *   all                      whether all runs are played at once, and there is no choice;   start, below: see there
 *   clocked                  whether time goes on between stops, and a stop stays told until the next
 */
function mountScene(el, data, opts, kind) {
  const decoded = {};
  const rate = step => kind.rate(step);
  const state = { t: 0, speed: 1, playing: false, stops: () => view.run.times, wait: () => false, rate };
  const ui = shell(el, data, state, { build, draw, turn: by => kind.turn?.(view, by) });
  const view = Object.assign(ui, { data, state, run: null, picked: null });
  const { root, caption, control } = view;
  let paint, said;
  kind.start?.(view);
  const foot = kind.figures ? footer(root, kind.numFigures ?? 5) : () => {};
  const which = kind.all ? () => 0 : choices(view.more, data, choose);
  kind.below?.(view);
  view.draw = draw;

  function choose() {
    const before = view.run && { run: view.run, t: state.t, over: state.t === view.run.times.at(-1) };
    view.run = decoded[which()] ??= kind.decode(kind.all ? data.runs : data.runs[which()], data);
    control.halt();
    state.t = before ? kind.resume(view, before) : 0;
    view.picked = null;
    view.source.textContent = view.run.source;
    view.scrub.build(...kind.parts(view.run));
    view.rebuild();
  }

  function build() {
    if (!view.run) return;
    view.field.replaceChildren();
    paint = kind.stage(view, view.width || 320);
    reserve(caption, kind.captions(view));
    said = null;
  }

  /** The stop that is shown or under way, and the last one that was reached. */
  function stopsAt(t) {
    const { times } = view.run;
    if (kind.clocked) return Array(2).fill(times.findLastIndex(s => s <= t + (kind.near ?? 0)));
    return [clamp(ceil(t - EPS), times.length - 1), clamp(floor(t + EPS), times.length - 1)];
  }

  function draw() {
    if (!paint) return;
    const { t, playing } = state;
    const [k, now] = stopsAt(t);
    view.shown = paint(t);
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== k) write(caption, kind.tell(view, k));
    said = k;
    foot(kind.figures?.(view));
    kind.after?.(view, k, now);
    view.scrub.set(t, now, kind.words(view, now), kind.clocked ? -1 : k - 1);
    control.paint();
    const steps = view.run.times.length - 1;
    Object.assign(root.dataset, { step: now, steps, playing, ...kind.told?.(view) });
    opts.onChange?.({ step: now, playing });
  }
  choose();
  return view;
}

/** What a kind provides if its runs have their stops in their data. */
const byStops = {
  tell: ({ run }, k) => run.stops[k].say,
  captions: ({ run }) => run.stops.map(stop => stop.say),
  words: ({ run }, k) => plain(run.stops[k].say),
  parts: ({ times, stops }) => [times, stops.slice(1).map(stop => stop.phase)],
};

/** Let the reader point at marks, touch them or give them the focus: view.picked is what of(mark) says, or null. */
function pickable(view, selector, of, show) {
  const { field } = view;
  const pick = picked => {
    if (picked === view.picked) return;
    view.picked = picked;
    show();
    view.draw();
  };
  const at = e => {
    const mark = e.target.closest(selector);
    return mark ? of(mark) : null;
  };
  field.onpointerover = field.onclick = e => pick(at(e)); // a finger that has left has clicked
  field.onpointerleave = () => pick(null);
  field.addEventListener("focusin", e => pick(at(e)));
  field.addEventListener("focusout", () => pick(null));
}

// # mounting
const VERSION = 2;  // DATA_VERSION in registry.py

/** Why this script cannot draw such data, which a notebook may have stored long ago; "" if it can. */
function mismatch({ v }) {
  if (v === VERSION) return "";
  return `These data have version ${v}, and this page draws version ${VERSION}: run the cell again.`;
}

/** widgetOf(data): the function that draws such data; in a page data-lockstep-<name> holds it. */
function define(name, widgetOf) {
  const key = "lockstep" + upper(name);

  function mount(el, data, opts = {}) {
    const { root, state, control, alert, destroy } = widgetOf(data)(el, data, opts);
    const finish = () => control.go(control.end());
    addEventListener("beforeprint", finish);
    return {
      root,
      step: k => control.go(state.stops()[clamp(k, state.stops().length - 1)]),
      playing: on => on !== state.playing && control.toggle(),
      error: text => {
        alert.textContent = text;
        alert.hidden = !text;
      },
      destroy: () => {
        removeEventListener("beforeprint", finish);
        destroy();
      },
    };
  }

  /** anywidget's model has the traits of a widget of book.widgets.live. */
  function render({ model, el }) {
    let player;
    const push = traits => {
      for (const k in player && traits) {
        if (model.get(k) === traits[k]) continue;
        model.set(k, traits[k]);
        model.save_changes();
      }
    };
    const set = trait => player[trait](model.get(trait));
    const draw = () => {
      player?.destroy();
      player = null;
      player = mount(el, JSON.parse(model.get("payload")), { onChange: push });
      set("error");
    };
    const heard = {
      payload: draw,
      error: () => set("error"),
      playing: () => set("playing"),
      step: () => model.get("step") !== +player.root.dataset.step && set("step"),
    };
    draw();
    if (model.get("step")) set("step");
    for (const k in heard) model.on("change:" + k, heard[k]);
    return () => {
      for (const k in heard) model.off("change:" + k, heard[k]);
      player.destroy();
    };
  }

  function scan(root = document) {
    for (const el of root.querySelectorAll(`[data-lockstep-${name}]:not([data-mounted])`)) {
      el.dataset.mounted = "";
      const data = JSON.parse(el.dataset[key]);
      const fault = mismatch(data);
      if (fault) el.prepend(make("p", null, { role: "alert" }, fault));
      else el.replaceChildren();
      if (!fault) mount(el, data);
    }
  }
  globalThis[key] = { mount, scan, render };
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", () => scan());
  else scan();
}

export {
  make, canvas, rect, bar, rankName, swatch, pill, choice, choices, footer, frame, watchWidth, shell, write, reserve,
  mountScene, pickable, define, EPS, range, clamp, sum, byTouch, color, and, num, upper, seconds, bytes,
  short, ease, plain, longest, byStops,
};
