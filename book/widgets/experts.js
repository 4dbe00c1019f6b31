/* Lockstep's expert player: tokens at home in the colours of the experts that they want, the experts' queues, and the
   rows that travel. experts.py says what the data mean; nothing is drawn that they don't say. */
import { EPS, range, clamp, make, canvas, color, rect, ease, rankName, mountScene, byStops, define } from "./scene.js";

const { min, max, ceil, floor } = Math;
const [CHOSEN, NUMBERS, ROWS, WORK, BACK] = [1, 2, 3, 4, 5]; // the stops after the start

/** Every choice as a mark: its token, the place among the token's choices, its expert, and its place there, or -1. */
function decode(raw) {
  const marks = raw.wants.flatMap((experts, token) => experts.map((expert, i) => {
    return { token, i, of: experts.length, expert, at: raw.queues[expert].indexOf(token) };
  }));
  const rows = range(raw.n, r => raw.queues.slice(r * raw.per, (r + 1) * raw.per).flat().length);
  return { ...raw, times: range(raw.stops.length), marks, rows, own: raw.wants.length / raw.n };
}

// # layout: each rank's tokens, and beside them (or below) the queues of its experts
function plan({ n, per, own, queues }, W) {
  const wide = W >= 560;
  const cell = wide ? 17 : 15;
  const left = wide ? 62 : 58;
  const names = wide ? left + own * cell + 26 : 0; // of the experts; behind them the queues
  const start = names + 80;
  const longest = max(...queues.map(queue => queue.length), 1);
  const slot = min(cell, floor(((W - start - 26) / longest) * 10) / 10);
  const head = wide ? 0 : cell + 7;
  const each = head + per * (cell + 3) + (wide ? 11 : 12);
  const top = wide ? 24 : 4;
  const y = r => top + r * each;
  const home = token => [left + (token % own) * cell, y(floor(token / own))];
  const place = (expert, at) => [start + at * slot, y(floor(expert / per)) + head + (expert % per) * (cell + 3)];
  return { W, H: y(n) - 4, wide, cell, slot, names, start, y, home, place };
}

function drawFrame(rest, { n, queues }, { wide, cell, names, start, y, home, place }) {
  if (wide) {
    make("text.lk-tiny", rest, { x: home(0)[0], y: 12 }, "its tokens");
    make("text.lk-tiny", rest, { x: start, y: 12 }, "rows at its experts");
  }
  for (let r = 0; r < n; r++) make("text.lk-rank", rest, { x: 0, y: y(r) + cell - 4 }, `rank ${r}`);
  queues.forEach((_, expert) => {
    const at = make("g", rest, { transform: `translate(${names},0)` });
    rankName(at, expert, place(expert, 0)[1] + cell - 4, `expert ${expert}`);
  });
}

/** Where a mark is at home: its part of the token's square. */
function atHome({ token, i, of }, { cell, home }) {
  const [x, y] = home(token);
  return [x + 1 + ((cell - 2) * i) / of, y + 1, (cell - 2) / of - (i + 1 < of ? 0.75 : 0), cell - 2];
}

function inQueue({ expert, at }, { slot, cell, place }) {
  const [x, y] = place(expert, at);
  return [x + 0.6, y + 1, slot - 1.2, cell - 2];
}

const filled = (box, expert, look = "") => rect(box, `rx="1.5" fill="${color(expert)}" class="${look}"`);

/** The tokens at home after stop k; of each rank so many have chosen. */
function homes({ marks, wants, back, own }, set, k, chosen = own) {
  const empty = wants.map((_, token) => {
    return rect([...set.home(token).map(v => v + 1), set.cell - 2, set.cell - 2], 'class="lk-slot" rx="1.5"');
  });
  const shown = marks.map(mark => {
    const box = atHome(mark, set);
    if (k < CHOSEN || mark.token % own >= chosen) return "";
    if (mark.at < 0) return crossed(box, mark.expert);
    const away = k >= ROWS && (k < BACK || back[mark.token] !== 1);
    return filled(box, mark.expert, away ? "lk-pale" : "");
  });
  return [...empty, ...shown].join("");
}

/** A choice without a place: an outline, crossed out. */
function crossed([x, y, w, h], expert) {
  const lines = `M${x + 1} ${y + 1}h${w - 2}v${h - 2}h${2 - w}zl${w - 2} ${h - 2}m0 ${2 - h}l${2 - w} ${h - 2}`;
  return `<path d="${lines}" fill="none" stroke="${color(expert)}" stroke-width="1.3"/>`;
}

/** The queues after stop k; while the experts work, so many rows of each rank are done. */
function waiting({ queues, per }, set, k, done) {
  const row = (expert, at) => {
    const box = inQueue({ expert, at }, set);
    if (k < NUMBERS) return "";
    if (k === NUMBERS || k === BACK) return rect(box, 'class="lk-slot" rx="1.5"');
    const before = queues.slice(floor(expert / per) * per, expert).flat().length; // a rank works on one row at a time
    return filled(box, expert, before + at < done ? "lk-pale" : "");
  };
  return queues.flatMap((queue, expert) => queue.map((_, at) => row(expert, at))).join("");
}

function stage(view, W) {
  const { run, data } = view;
  const set = plan(run, W);
  const { rest, move } = canvas(view.field, W, set.H, { "aria-label": data.title });
  drawFrame(rest, run, set);
  const [tokens, rows] = [make("g", rest), make("g", rest)];
  const lengths = run.queues.map((queue, expert) => {
    const [x, y] = set.place(expert, queue.length);
    return make("text", rest, { x: x + 5, y: y + set.cell - 4 }, queue.length);
  });
  const most = max(...run.rows);
  const ghosts = run.marks.filter(({ at }) => at >= 0).map(mark => {
    const g = make("g", move);
    const [from, to] = [atHome(mark, set), inQueue(mark, set)];
    g.innerHTML = filled([0, 0, min(from[2], to[2]), from[3]], mark.expert);
    return { g, from, to };
  });
  let painted;

  function paint(k, done) {
    tokens.innerHTML = homes(run, set, k, k === CHOSEN ? done : run.own);
    rows.innerHTML = waiting(run, set, k, done);
    for (const text of lengths) text.style.visibility = k >= NUMBERS ? "" : "hidden";
  }
  return t => {
    const k = ceil(t - EPS);
    const f = t - k + 1;
    const over = !k || f >= 1 - EPS;
    const travels = !over && (k === ROWS || k === BACK);
    // choices are drawn one by one, and so are rows in work; whatever else changes, changes at once
    const num = { [CHOSEN]: run.own, [WORK]: most }[k] ?? 0;
    const [stop, done] = travels ? [k === ROWS ? NUMBERS : BACK, 0] : [k, floor(f * num + EPS)];
    const key = `${stop} ${done} ${travels}`;
    if (painted !== key) paint(stop, done);
    if (painted !== key && travels && k === BACK) tokens.innerHTML = homes(run, set, WORK);
    painted = key;
    move.style.visibility = travels ? "" : "hidden";
    const way = ease(clamp(k === BACK ? 1 - f : f));
    for (const { g, from, to } of travels ? ghosts : []) {
      const [x, y] = [0, 1].map(i => (from[i] + (to[i] - from[i]) * way).toFixed(1));
      g.setAttribute("transform", `translate(${x},${y})`);
    }
    return k;
  };
}

const kind = {
  ...byStops,
  decode,
  stage,
  rate: step => (step ? 0.8 : 0.6),
  /** At the same stop of another run; a run at its end stays at the end. */
  resume: (view, { t }) => floor(t + EPS),
  figures: ({ run }) => run.figures,
  numFigures: 3,
  told: ({ run }) => ({ ranks: run.n, rows: run.rows.join(" ") }),
};

define("experts", () => (el, data, opts) => mountScene(el, data, opts, kind));
