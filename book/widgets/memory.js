/* Lockstep's memory player: what each rank holds of each unit of a model, and what moves. memory.py says what the data
   mean; nothing is drawn that they don't say. */
import {
  EPS, range, clamp, sum, make, canvas, color, bytes, rect, ease, rankName, mountScene, byStops, define,
} from "./scene.js";

const { min, max, ceil, floor } = Math;
const LANES = 3; // kinds of state that have a lane; activations are in the bar to scale alone
const NAMES = ["parameters", "gradients", "optimizer state", "activations"];

/** What is held at each stop: [bytes, look] by kind and unit; the sums of each kind, and what was sent so far. */
function decode(raw) {
  let held = NAMES.map(() => raw.units.map(() => [0, ""]));
  const states = raw.stops.map(({ set }) => {
    held = held.map(kind => [...kind]);
    for (const [kind, unit, size, look] of set) held[kind][unit] = [size, look];
    return held;
  });
  const sums = states.map(state => state.map(kind => sum(kind, ([size]) => size)));
  const sent = raw.stops.map((_, k) => sum(raw.stops.slice(0, k + 1), stop => stop.sent));
  return { ...raw, times: range(raw.stops.length), states, sums, sent };
}

// # layout: for each rank a strip of units, each with a lane for each kind of state, and below it a bar to scale
function plan({ n, units }, W, room) {
  const wide = W >= 560;
  const left = wide ? 74 : 64;
  const gap = wide ? 6 : 4;
  const avail = W - left - gap * (units.length - 1) - 2;
  const least = min(34, (avail / units.length) * 0.8);
  const all = sum(units, unit => unit.bytes);
  const lane = n > 4 ? 6 : 8;
  const [bar, top] = [17, 22];
  const under = LANES * (lane + 2) + 4;
  const each = under - 4 + bar + (n > 4 ? 15 : 21);
  const scale = (W - left - 2 - 4 * (room.filter(Boolean).length - 1)) / sum(room);
  const cells = placed(
    left + 1,
    gap,
    units.map(unit => least + ((avail - units.length * least) * unit.bytes) / all),
  );
  const sections = placed(
    left + 1,
    4,
    room.map(size => size * scale),
  );
  const y = (r, kind) => top + r * each + kind * (lane + 2);
  return { wide, W, H: top + n * each - 6, left, lane, bar, top, each, cells, sections, scale, y, under };
}

/** Widths side by side, where there are any, with a gap between them. */
function placed(x, gap, widths) {
  return widths.map(w => {
    const cell = { x, w };
    x += w + (w && gap);
    return cell;
  });
}

/** Shard j of a unit, in its owner's colour. */
function piece({ x, w }, j, n, y, h, owner, pale) {
  const box = [x + (w * j) / n + 0.4, y, max(0.8, w / n - 0.8), h];
  return rect(box, `rx="1" fill="${color(owner)}"${pale ? ' class="lk-pale"' : ""}`);
}

/** What rank r holds of unit u, of one kind. */
function fill(run, r, kind, u, [size, look], { cells, lane, y }) {
  const { n } = run;
  const [cell, at] = [cells[u], y(r, kind)];
  if (look === "own") {
    const box = [cell.x, at, max(0.8, cell.w * min(1, size / run.units[u].bytes)), lane];
    return rect(box, `rx="1" fill="${color(r)}" class="lk-pale"`);
  }
  if (!look) return "";
  const shards = look === "shard" ? [r] : range(n);
  return shards.map(j => piece(cell, j, n, at, lane, j, look === "updated" && j !== r)).join("");
}

/** The same bytes, kind by kind and to scale. */
function bars(run, k, r, { wide, sections, scale, top, each, under, bar }) {
  const y = top + r * each + under;
  const h = wide ? bar : 5;
  const drawn = sections.map(({ x, w }, kind) => {
    const size = run.sums[k][kind];
    const held = size * scale;
    const text = size ? bytes(size) : "";
    const room = text.length * 6.2 + (wide ? 6 : 0);
    if (w < 1) return "";
    const inside = wide && held >= room;
    const beside = wide ? w - held >= room : w >= room;
    const tx = inside ? x + held / 2 : wide ? x + held + 5 : x; // on a phone below it
    const look = `class="${inside ? "lk-in" : "lk-out"}" text-anchor="${inside ? "middle" : "start"}"`;
    const words = `<text x="${tx.toFixed(1)}" y="${wide ? y + 12.5 : y + 16}" ${look}>${text}</text>`;
    const hold = size ? rect([x, y, max(0.8, held), h], `class="lk-hold" rx="2" fill="var(--m${kind})"`) : "";
    return rect([x, y, w, h], 'class="lk-whole" rx="2"') + hold + (inside || beside ? words : "");
  });
  return drawn.join("");
}

function drawHeads(parent, units, cells) {
  return units.map(({ name }, u) => {
    const fits = text => text.length * 6 <= cells[u].w + 3;
    const text = [name, name.replace(/^\D+ (?=\d+$)/, "")].find(fits) ?? "";
    const middle = cells[u].x + cells[u].w / 2;
    return make("text.lk-tiny", parent, { x: middle, y: 12, "text-anchor": "middle" }, text);
  });
}

function stage(view, W) {
  const { run, data } = view;
  const set = plan(run, W, data.room);
  const { rest, move } = canvas(view.field, W, set.H, { "aria-label": data.title });
  const { cells, y, lane, top, each } = set;
  const heads = drawHeads(rest, run.units, cells);
  const totals = range(run.n, r => {
    rankName(rest, r, top + r * each + 11);
    for (let kind = 0; kind < LANES; kind++) {
      for (const { x, w } of cells) make("rect.lk-slot", rest, { x, y: y(r, kind), width: w, height: lane, rx: 1 });
    }
    return make("text", rest, { x: 14, y: top + r * each + set.under + 12.5 });
  });
  const [held, ring] = [make("g", rest), make("g", rest)];
  let painted, under;
  let ghosts = [];

  function paintHeld(k) {
    const kinds = (r, kind) => run.states[k][kind].map((cell, u) => fill(run, r, kind, u, cell, set)).join("");
    const ranks = range(run.n, r => range(LANES, kind => kinds(r, kind)).join("") + bars(run, k, r, set));
    held.innerHTML = ranks.join("");
    for (const text of totals) text.textContent = bytes(sum(run.sums[k]));
  }
  function paintRing(stop) {
    const on = !stop ? [] : stop.unit === null ? range(cells.length) : [stop.unit];
    heads.forEach((text, u) => text.classList.toggle("lk-on", on.includes(u)));
    const around = (u, r) => [cells[u].x - 2, y(r, 0) - 2.5, cells[u].w + 4, LANES * (lane + 2) + 3];
    const rings = on.flatMap(u => range(run.n, r => rect(around(u, r), 'class="lk-ring" rx="4"')));
    ring.innerHTML = rings.join("");
  }
  return t => {
    const k = ceil(t - EPS);
    const f = t - k + 1;
    const stop = k ? run.stops[k] : null;
    const moves = !!stop?.sent;
    const done = !stop || f >= 1 - EPS || (!moves && f > 0.4) ? k : k - 1;
    if (painted !== done) paintHeld((painted = done));
    if (under !== k) {
      under = k;
      paintRing(stop);
      move.replaceChildren();
      ghosts = moves ? ghostsOf(run, stop, set, move) : [];
    }
    const flying = f < 1 - EPS && f > EPS && moves;
    move.style.visibility = flying ? "" : "hidden";
    if (flying) for (const ghost of ghosts) ghost(f);
    return done;
  };
}

/** Pieces on their way: piece j from rank a to rank b, between two parts of the step. */
function ghostsOf({ n }, { op, unit }, { cells, y, lane }, parent) {
  const kind = op === "all_gather" ? 0 : 1;
  const half = op === "all_reduce" ? 0.5 : 1;
  const pairs = range(n, j =>
    range(n)
      .filter(r => r !== j)
      .map(r => [j, r]),
  ).flat();
  const fly = (j, a, b, from, to, owner) => {
    const g = make("g", parent);
    g.innerHTML = piece(cells[unit], j, n, 0, lane, owner, false);
    return f => {
      const v = clamp((f - from) / (to - from));
      const at = y(a, kind) + (y(b, kind) - y(a, kind)) * ease(v);
      g.setAttribute("transform", `translate(0,${at.toFixed(1)})`);
      g.setAttribute("visibility", v > 0 && v < 1 ? "inherit" : "hidden");
    };
  };
  // All pieces j meet on rank j, and go to all from there.
  const add = op === "all_gather" ? [] : pairs.map(([j, r]) => fly(j, r, j, 0, half, r));
  const spread = op === "reduce_scatter" ? [] : pairs.map(([j, r]) => fly(j, j, r, 1 - half, 1, j));
  return [...add, ...spread];
}

function legend({ root, data }) {
  const box = make("div.lk-parts lk-small", make("div"));
  root.insertBefore(box.parentNode, root.querySelector(".lk-bar"));
  const entry = (text, attrs) => {
    const span = make("span", box);
    if (attrs) make("i", span, attrs);
    span.append(text);
  };
  const owner = "in the colour of the rank whose shard it is.";
  entry(`Each unit, from the top: parameters, gradients, optimizer state, ${owner}`);
  entry("held by another rank", { class: "none" });
  entry("own part of the batch only, or not yet updated", { class: "pale", style: "--c:var(--r0)" });
  entry("To scale:");
  NAMES.forEach((name, kind) => data.room[kind] && entry(name, { style: `--c:var(--m${kind})` }));
}

const kind = {
  ...byStops,
  start: legend,
  decode,
  stage,
  rate: step => (step ? 1.4 : 1.1),
  /** Continue at the same share of the step. */
  resume({ run }, { run: old, t, over }) {
    const steps = run.times.length - 1;
    return over ? steps : floor((t / (old.times.length - 1)) * steps + EPS);
  },
  /** Figures without a value are counted as the clock runs. */
  figures({ run, shown }) {
    const now = { 0: bytes(sum(run.sums[shown])), 3: bytes(run.sent[shown]) };
    return run.figures.map(([value, meaning], i) => [(value || now[i]).replace(" ", "\u00a0"), meaning]);
  },
  told: ({ run }) => ({ ranks: run.n }),
};

define("memory", () => (el, data, opts) => mountScene(el, data, opts, kind));
