/* Lockstep's sharded product: which rank holds which block of which matrix, what its sums contain and what moves.
   shards.py says what the data mean; nothing is drawn that they don't say. */
import {
  EPS, range, clamp, make, canvas, color, and, bytes, rect, bar, ease, rankName, mountScene, byStops,
  pickable, define,
} from "./scene.js";

const { min, max, abs, floor, ceil } = Math;
const NONE = "var(--p0)";

/** What each rank has at each stop, by matrix and number of block; what is undefined, it does not have. */
function decode(raw) {
  let held = range(raw.n, () => raw.matrices.map(() => []));
  const states = raw.stops.map(({ set }) => {
    held = held.map(rank => rank.map(blocks => [...blocks]));
    for (const [rank, m, number, contents] of set) held[rank][m][number] = contents;
    return held;
  });
  const lines = 1 + max(...raw.matrices.map(m => m.line));
  return { ...raw, times: range(raw.stops.length), states, lines, cells: cellsOf(raw, lines) };
}

/** The places of matrices, rank by rank; each with all matrices that are shown there in turn. */
function cellsOf({ n, matrices, slots }, lines) {
  const stand = (m, line, slot) => matrices[m].slot === slot && matrices[m].line === line;
  const places = range(n).flatMap(r => range(lines).flatMap(line => slots.map((_, slot) => ({ r, line, slot }))));
  const cells = places.map(cell => ({
    ...cell,
    all: range(matrices.length).filter(m => stand(m, cell.line, cell.slot)),
  }));
  return cells.filter(cell => cell.all.length).map((cell, i) => ({ ...cell, i }));
}

const has = blocks => blocks.some(held => held !== undefined);
/** Which matrix is shown in a place: the one that came last. */
const shown = (state, cell) => cell.all.findLast(m => has(state[cell.r][m])) ?? cell.all[0];

/** [first row, last, first column, last] of what is held. */
function span({ grid: [down, across], shape: [height, width] }, blocks) {
  const numbers = range(down * across).filter(k => blocks[k] !== undefined);
  const edge = (list, parts, size) => [(min(...list) * size) / parts, ((max(...list) + 1) * size) / parts];
  const rows = numbers.map(k => floor(k / across));
  const columns = numbers.map(k => k % across);
  return [...edge(rows, down, height), ...edge(columns, across, width)];
}

/** What the blocks of a place contain; odd: a count other than 0 and 1. */
function sums(m, blocks) {
  const held = blocks.filter(h => h !== undefined);
  const n = m.lanes;
  if (!held.length || held.includes(null)) return { unknown: held.length > 0 };
  const lanes = held.flatMap(h => h.slice(0, n));
  const parts = range(n).filter(i => held.every(h => h[i]));
  const odd = lanes.filter(x => x && x !== 1).reduce((a, b) => (abs(b) > abs(a) ? b : a), 0);
  const bias = m.bias ? +max(...held.map(h => h[n])).toFixed(2) : 0;
  return { parts, odd: +odd.toFixed(2), done: parts.length === n && !odd, bias };
}

/** The same in short: [text, whether it is bad, whether it is complete]. */
function count(m, blocks) {
  const { unknown, parts, odd, done, bias } = sums(m, blocks);
  if (!parts) return [unknown ? "?" : "", unknown, false];
  const terms = odd ? "×" + odd : m.lanes > 1 ? `${parts.length}/${m.lanes}` : "";
  const biases = bias ? (bias === 1 ? "b" : bias + "b") : "";
  return [[terms, biases].filter(Boolean).join(" + "), !!odd || bias > 1, done];
}

// # blocks
/** One block: a bar for each part of its sum, hollow where missing, hatched where double. */
function fill(m, k, contents, w, h, extra = "") {
  const [down, across] = m.grid;
  const [tw, th] = [w / across, h / down];
  const [x, y] = [(k % across) * tw, floor(k / across) * th];
  if (contents === null) return rect([x + 3, y + 3, tw - 6, th - 6], 'class="lk-blank"');
  const pad = 2;
  const bw = (tw - 2 * pad) / contents.length;
  const own = m.paint === "row" ? floor(k / across) : k % across;
  const bars = contents.map((times, i) => {
    if (!(times > 0)) return "";
    const tall = min(1, times) * (th - 2 * pad);
    const paint = i >= m.lanes ? "var(--p2)" : m.lanes > 1 ? color(i) : m.paint ? color(own) : NONE;
    const box = [x + pad + i * bw + 0.5, y + th - pad - tall, max(1, bw - 1), tall];
    return bar(box, times, `rx="1.5" fill="${paint}" ${extra}`);
  });
  return bars.join("");
}

function fills(m, blocks, w, h) {
  const drawn = range(m.grid[0] * m.grid[1], k => (blocks[k] === undefined ? "" : fill(m, k, blocks[k], w, h)));
  return drawn.join("");
}

// # stage: a row of matrices for each rank, the gradients below them
function plan({ n, slots, lines }, W) {
  const wide = W >= 560;
  const [left, gap, head] = wide ? [74, 34, 0] : [0, 15, 20];
  const [top, under, S] = [34, 18, slots.length];
  const w = floor(min(S > 3 ? 132 : 180, (W - left - gap * (S - 1) - 12) / S));
  const h = n > 2 || lines > 1 ? 42 : 58;
  const each = head + lines * (h + under) + (n > 2 ? 8 : 14);
  const place = ({ r, line, slot }) => [left + slot * (w + gap) + 1, top + r * each + head + line * (h + under)];
  return { W, H: top + n * each, wide, gap, w, h, place };
}

function drawFrame(rest, run, { wide, gap, w, h, place }) {
  const base = slot => run.matrices.filter(m => m.line === 0 && m.slot === slot).at(-1);
  const middle = { "text-anchor": "middle" };
  run.slots.forEach((slot, i) => {
    const { recipe, shape } = base(i);
    const x = place({ r: 0, line: 0, slot: i })[0] + w / 2;
    make("text.lk-rank", rest, { x, y: 12, ...middle }, slot);
    make("text.lk-tiny", rest, { x, y: 26, ...middle }, recipe ? "= " + recipe : shape.join("×"));
  });
  for (let r = 0; r < run.n; r++) {
    const y = place({ r, line: 0, slot: 0 })[1];
    rankName(rest, r, wide ? y + h / 2 + 4 : y - 8);
    for (let i = 1; i < run.slots.length; i++) {
      const x = place({ r, line: 0, slot: i })[0] - gap / 2;
      const at = { x, y: y + h / 2 + 5, ...middle, style: `font-size:${wide ? 18 : 14}px` };
      make("text", rest, at, base(i).recipe ? "=" : "·");
    }
  }
}

function stage(view, W) {
  const { run, data } = view;
  const set = plan(run, W);
  const { rest, move } = canvas(view.field, W, set.H, { role: "group", "aria-label": data.title });
  const cells = make("g", rest);
  drawFrame(rest, run, set);
  const painters = run.cells.map(cell => drawCell(cells, run, cell, set));
  const wires = make("g", rest);
  let under = null;
  let ghosts = [];
  return t => {
    const k = ceil(t - EPS);
    const f = t - k + 1;
    const { moves, busy } = run.stops[k];
    const together = moves.length > 0;
    const done = !k || f >= 1 - EPS || (!together && f > 0.5) ? k : k - 1;
    for (const paint of painters) paint(run.states[done], k ? busy : []);
    if (under !== k) {
      under = k;
      wires.replaceChildren();
      move.replaceChildren();
      ghosts = together ? ghostsOf(run, k, set, move) : [];
      for (const m of new Set(moves.map(([m]) => m))) wire(wires, run.matrices[m], run.n, set);
    }
    move.style.visibility = f < 1 - EPS && f > EPS ? "" : "hidden";
    for (const { g, x, from, to } of ghosts) {
      g.setAttribute("transform", `translate(${x},${(from + (to - from) * ease(f)).toFixed(1)})`);
    }
    return done;
  };
}

/** Which ranks' blocks meet. */
function wire(parent, m, n, { w, h, place }) {
  const ys = range(n, r => place({ r, line: m.line, slot: m.slot })[1] + h / 2);
  const x = place({ r: 0, line: m.line, slot: m.slot })[0] + w;
  const joints = ys.map(y => `M${x + 1} ${y}h6`).join("");
  make("path.lk-wire", parent, { d: `M${x + 7} ${ys[0]}V${ys.at(-1)}${joints}` });
}

function ghostsOf(run, k, { w, h, place }, parent) {
  return run.stops[k].moves.map(([i, src, dst, numbers]) => {
    const m = run.matrices[i];
    const own = run.states[k - 1][src][i];
    const g = make("g", parent);
    const at = r => place({ r, line: m.line, slot: m.slot });
    g.innerHTML = numbers.map(b => fill(m, b, own[b], w, h, 'class="lk-ghost"')).join("");
    return { g, x: at(src)[0], from: at(src)[1], to: at(dst)[1] };
  });
}

/** Returns what paints it. */
function drawCell(parent, run, cell, { w, h, place }) {
  const [x, y] = place(cell);
  const attrs = { transform: `translate(${x},${y})`, role: "img", tabindex: cell.i ? -1 : 0, "data-i": cell.i };
  const g = make("g.lk-cell", parent, attrs);
  make("rect.lk-hull", g, { width: w, height: h, rx: 4 });
  const inner = make("g", g);
  const text = make("text.lk-tiny", g, { x: w / 2, y: h + 12.5, "text-anchor": "middle" });
  let last, mark;
  return (state, busy) => {
    const i = shown(state, cell);
    const m = run.matrices[i];
    const blocks = state[cell.r][i];
    const now = busy.some(b => cell.all.includes(b));
    if (mark !== now) g.classList.toggle("busy", now);
    mark = now;
    if (last === blocks) return;
    last = blocks;
    inner.innerHTML = fills(m, blocks, w, h);
    const [, bad, done] = count(m, blocks);
    text.textContent = labels(run, m, blocks).find(s => s.length * 6 <= w + 12) ?? "";
    text.setAttribute("class", "lk-tiny" + (bad ? " bad" : done && m.lanes > 1 ? " done" : ""));
    g.setAttribute("aria-label", tellCell(run, cell, state).join(""));
  };
}

/** What may stand below a place, long ones first. */
function labels({ slots }, m, blocks) {
  const [sum] = count(m, blocks);
  const name = m.line || slots[m.slot] !== m.name ? m.name + " " : "";
  const [top, bottom, a, z] = has(blocks) ? span(m, blocks) : [];
  const size = has(blocks) ? `${bottom - top}×${z - a}` : "";
  const terms = sum + (/\d\/\d$/.test(sum) ? " terms" : "");
  const what = sum && m.lanes > 1 ? terms : [size, sum].filter(Boolean).join(" ");
  return [name + what, name + (sum || size), sum || size];
}

// # words
/** [name, the rest] of what a rank has in a place. */
function tellCell(run, cell, state) {
  const i = shown(state, cell);
  const m = run.matrices[i];
  const blocks = state[cell.r][i];
  const name = `${m.name} on rank ${cell.r}`;
  if (!has(blocks)) return [name, ": nothing yet."];
  const [top, bottom, a, z] = span(m, blocks);
  const part = (x, y, size, what) => (y - x === size ? `all ${size} ${what}` : `${what} ${x} to ${y - 1}`);
  const where = `${part(top, bottom, m.shape[0], "rows")}, ${part(a, z, m.shape[1], "columns")}`;
  const size = bytes((bottom - top) * (z - a) * run.item);
  return [name, `${m.recipe && " = " + m.recipe}: ${where} of ${m.shape.join("×")}, ${size}${tellSum(m, blocks)}.`];
}

function tellSum(m, blocks) {
  const { unknown, parts, odd, done, bias } = sums(m, blocks);
  if (unknown) return `; not made of blocks of ${m.name}`;
  const of = parts.length ? `, of part${parts.length > 1 ? "s" : ""} ${and(parts)}` : "";
  const some = done ? `; all ${m.lanes} terms` : `; ${parts.length} of ${m.lanes} terms${of}`;
  const terms = odd ? `; counted ×${odd}` : m.lanes === 1 ? "" : some;
  const biases = bias ? `, the bias${bias > 1 ? " ×" + bias : ""}` : ", no bias";
  return terms + (m.bias ? biases : "");
}

// # widget
const kind = {
  ...byStops,
  below(view) {
    view.detail = make("div.lk-detail lk-small", view.root);
    pickable(
      view,
      ".lk-cell",
      mark => +mark.dataset.i,
      () => mark(view),
    );
  },
  decode,
  stage,
  rate: step => (step ? 1.4 : 0.6),
  /** From the start; a run at its end stays at the end. */
  resume: ({ run }, { over }) => (over ? run.times.length - 1 : 0),
  /** Formulas and sizes stay on one line. */
  figures({ run }) {
    const joined = text => text.replaceAll(" = ", "\u00a0=\u00a0").replaceAll(" kB", "\u00a0kB");
    return run.figures.map(pair => pair.map(joined));
  },
  /** The place that is pointed at, or that the step works on. */
  after({ run, picked, detail, shown: now }, k) {
    const last = run.stops[k].busy.at(-1);
    const cell =
      picked ??
      max(
        0,
        run.cells.findIndex(c => c.r === 0 && c.all.includes(last)),
      );
    const [name, rest] = tellCell(run, run.cells[cell], run.states[now]);
    if (detail.textContent !== name + rest) detail.replaceChildren(make("b", null, {}, name), rest);
  },
  told: ({ run }) => ({ ranks: run.n }),
  turn({ run, field, picked }, by) {
    const last = run.cells.length - 1;
    field.querySelector(`[data-i="${clamp((picked ?? (by > 0 ? -1 : last + 1)) + by, last)}"]`).focus();
  },
};

function mark({ field, picked }) {
  for (const g of field.querySelectorAll(".lk-cell")) {
    g.classList.toggle("on", +g.dataset.i === picked);
    if (picked !== null) g.setAttribute("tabindex", +g.dataset.i === picked ? 0 : -1);
  }
}

define("shards", () => (el, data, opts) => mountScene(el, data, opts, kind));
