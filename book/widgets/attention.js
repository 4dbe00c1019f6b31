/* Lockstep's attention player: which scores of a cut sequence each rank works on, and whose keys and values it has.
   attention.py says what the data mean; nothing is drawn that they don't say. */
import {
  EPS, range, clamp, make, canvas, color, rect, ease, num, rankName, mountScene, byStops, define,
} from "./scene.js";

const { min, max, ceil, floor } = Math;
const TRAVEL = 0.6; // of a step: then the work is shown

/** The scores that are done before each stop. */
function decode(raw) {
  const done = raw.stops.map((_, k) => raw.stops.slice(0, k).flatMap(({ set }) => set));
  return { ...raw, times: range(raw.stops.length), done };
}

// # layout: the scores, queries down and keys across; beside them the ranks
function plan({ n, rows }, W) {
  const wide = W >= 560;
  const [left, top] = wide ? [26, 34] : [24, 30];
  const cell = floor(min(wide ? 224 : 180, W - left - 146) / rows.length / 0.5) * 0.5;
  const side = cell * rows.length;
  const each = max(wide ? 50 : 46, side / n);
  const x = left + side + (wide ? 36 : 10);
  const y = r => top - 14 + r * each;
  const chip = { x: x + (wide ? 74 : 0), lower: wide ? 0 : 20, w: 118, h: 22 };
  return { W, H: max(top + side, y(n)) + 2, wide, left, top, cell, side, x, y, chip };
}

const box = ({ left, top, cell }, query, key, gap = 0.75) => {
  return [left + key * cell + gap, top + query * cell + gap, cell - 2 * gap, cell - 2 * gap];
};

function drawFrame(rest, { rows }, set) {
  const { left, top, cell, side } = set;
  make("text.lk-tiny", rest, { x: left, y: 11 }, "keys");
  make("text.lk-tiny", rest, { x: 0, y: top + side / 2, transform: `rotate(-90 10 ${top + side / 2})` }, "queries");
  const marks = rows.map((r, token) => {
    const at = token * cell + 0.5;
    const across = rect([left + at, top - 9, cell - 1, 6], `fill="${color(r)}"`);
    return across + rect([left - 9, top + at, 6, cell - 1], `fill="${color(r)}"`);
  });
  const slot = 'class="lk-slot" rx="2"';
  const needed = rows.flatMap((_, query) => range(query + 1, key => rect(box(set, query, key), slot)));
  make("g", rest).innerHTML = [...marks, ...needed].join("");
}

/** Scores in the colour of the rank that works on them. */
function fills(set, rows, scores, look) {
  const one = (query, key) => rect(box(set, query, key), `rx="2" fill="${color(rows[query])}" class="${look}"`);
  return scores.map(([query, keys]) => keys.map(key => one(query, key)).join("")).join("");
}

/** A rank's place: its name, whose keys and values it has, and how much it works on. */
function drawRank(parent, run, r, { x, y, chip, W, wide }) {
  const at = y(r);
  rankName(make("g", parent, { transform: `translate(${x},0)` }), r, at + 15);
  const [held, bar] = [make("g", parent), make("g", parent)];
  const [tx, ty] = wide ? [chip.x, at + 40] : [x + 66, at + 15]; // of the text; before it a bar, if there is room
  const most = wide ? min(150, W - tx - 84) : 0;
  const text = make("text", parent, { y: ty });
  return (owner, work) => {
    held.innerHTML = owner === null ? "" : chipOf(owner, chip.x, at + chip.lower, chip);
    const w = (most * work) / run.most;
    bar.innerHTML = w ? rect([tx, ty - 10, w, 10], `rx="2" fill="${color(r)}"`) : "";
    text.setAttribute("x", tx + (w ? w + 6 : 0));
    text.textContent = num(work, "score");
  };
}

function chipOf(owner, x, y, { w, h }) {
  const dot = `<circle cx="${x + 11}" cy="${y + h / 2}" r="5" fill="${color(owner)}"/>`;
  const words = `<text x="${x + 21}" y="${y + h / 2 + 4.5}">K, V of rank ${owner}</text>`;
  return rect([x, y, w, h], 'class="lk-box" rx="6"') + dot + words;
}

function stage(view, W) {
  const { run, data } = view;
  const set = plan(run, W);
  const { rest, move } = canvas(view.field, W, set.H, { "aria-label": data.title });
  drawFrame(rest, run, set);
  const [before, now] = [make("g", rest), make("g", rest)];
  const ranks = range(run.n, r => drawRank(rest, run, r, set));
  let painted, under;
  let ghosts = [];

  function paint(k, arrived) {
    const { set: scores, holds, work, moves } = run.stops[k];
    before.innerHTML = fills(set, run.rows, run.done[k], "lk-pale");
    now.innerHTML = arrived ? fills(set, run.rows, scores, "") : "";
    const gone = moves.map(([src]) => src);
    ranks.forEach((draw, r) => {
      const has = arrived ? holds[r] : gone.includes(r) ? null : run.stops[k - 1].holds[r];
      draw(has, arrived ? work[r] : 0);
    });
  }
  return t => {
    const k = ceil(t - EPS);
    const f = t - k + 1;
    const arrived = !k || f > (run.stops[k].moves.length ? TRAVEL : 0.3) || f >= 1 - EPS;
    const key = 2 * k + arrived;
    if (painted !== key) paint(k, arrived);
    painted = key;
    if (under !== k) {
      under = k;
      ghosts = ghostsOf(run.stops[k].moves, set, move);
    }
    move.style.visibility = arrived ? "hidden" : "";
    for (const { g, from, to } of ghosts) {
      const y = from + (to - from) * ease(clamp(f / TRAVEL));
      g.setAttribute("transform", `translate(0,${y.toFixed(1)})`);
    }
    return k;
  };
}

function ghostsOf(moves, { y, chip }, parent) {
  parent.replaceChildren();
  return moves.map(([src, dst, owner]) => {
    const g = make("g", parent);
    g.innerHTML = chipOf(owner, chip.x, 0, chip);
    return { g, from: y(src) + chip.lower, to: y(dst) + chip.lower };
  });
}

const kind = {
  ...byStops,
  decode,
  stage,
  rate: step => (step ? 1.1 : 0.6),
  /** At the same stop of another run; a run at its end stays at the end. */
  resume: ({ run }, { t, over }) => (over ? run.times.length - 1 : min(floor(t + EPS), run.times.length - 1)),
  figures: ({ run }) => run.figures,
  numFigures: 3,
  told: ({ run }) => ({ ranks: run.n }),
};

define("attention", () => (el, data, opts) => mountScene(el, data, opts, kind));
