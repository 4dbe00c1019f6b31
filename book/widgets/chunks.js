/* Chunks of ranks as the player and the opening page draw them: a run, bars of what chunks hold, cards on a ring or in
   a matrix, and what moves between them. player.py says what the data mean. */
import { EPS, bar, canvas, color, make, range, rect } from "./scene.js";

const { min, max, abs, floor, hypot } = Math;

// # data: messages, contents
/** A run as it is drawn. Equal contents are the same array: drawing compares by identity. */
function decode(data) {
  const { times, transfers, contents } = data;
  const items = transfers.leaves.map((k, i) => {
    const item = Object.fromEntries(Object.entries(transfers).map(([name, column]) => [name, column[i]]));
    const end = (item.arrives ?? k) + 1;
    const [s0, s1] = times ? times[i].map(x => (x / 1e4) * data.duration_s) : [k, k + 1];
    return { ...item, k, end, s0, s1, sent: contents[item.sent], after: contents[item.after] };
  });
  const each = (rows, f = v => v) => rows.map(row => row.map(place => f(contents[place])));
  const updates = each(data.start, v => [{ k: 0, s: 0, v }]);
  const run = { ...data, items, goals: each(data.goals), updates };
  for (const { dst, into, end, s1, after } of items) {
    if (into !== null) updates[dst][into].push({ k: end, s: s1, v: after });
  }
  for (const [k, r, c, place] of data.holds) updates[r][c].push({ k, s: endOf(run, k), v: contents[place] });
  for (const list of updates.flat()) list.sort((a, b) => a.k - b.k);
  run.wrong = wrongFrom(run);
  return gather(run);
}

/** From which step on a chunk of a run that broke its promise is wrong: undefined if it never is. */
function wrongFrom(run) {
  const since = Object.fromEntries((run.fault?.cells ?? []).map(([r, c, k]) => [r * run.c + c, k]));
  return (r, c) => since[r * run.c + c];
}

const endOf = (run, k) => max(0, ...run.items.filter(i => i.k < k).map(i => i.s1));

/** Items of one step, sender and receiver travel as one message. */
function gather(run) {
  const byKey = {};
  for (const i of run.items) {
    const pair = `${i.src},${i.dst}`;
    const m = (byKey[[i.k, pair]] ??= { ...i, pair, items: [], share: 0 });
    m.items.push(i);
    m.s0 = min(m.s0, i.s0);
    m.s1 = max(m.s1, i.s1);
    m.share += run.shares?.[i.chunk] ?? 1 / run.c;
  }
  run.messages = Object.values(byKey);
  run.links = [...new Set(run.messages.map(m => m.pair))];
  run.both = new Set(run.messages.filter(m => byKey[[m.k, m.dst, m.src]]).map(m => m.pair));
  run.most = max(1, ...run.messages.map(m => m.items.length));
  return run;
}

/** clock: "steps", all equally long, or "time", as long as modelled. */
function retime(run, clock) {
  const timed = clock === "time";
  for (const m of run.messages) [m.a, m.b] = timed ? [m.s0, m.s1] : [m.k, m.end];
  for (const list of run.updates.flat()) {
    for (const u of list) u.at = timed ? u.s : u.k;
    list.sort((a, b) => a.at - b.at);
  }
  run.stops = range(run.S + 1, k => (timed ? endOf(run, k) : k));
  run.end = run.stops[run.S];
  return run;
}

const latest = (run, r, c, t) => run.updates[r][c].findLast(u => u.at <= t + EPS);

/** Whether a chunk holds what was promised there, or the mean of it. */
function complete({ goals, n }, r, c, v) {
  const goal = goals[r][c];
  return !!v && !!goal && [1, n].some(k => v.every((x, i) => abs(x * k - goal[i]) < 1e-3));
}

function tally(run, t) {
  const whole = (r, c) => complete(run, r, c, latest(run, r, c, t).v);
  const all = run.goals.flatMap((row, r) => row.flatMap((goal, c) => (goal ? whole(r, c) : [])));
  return [all.filter(Boolean).length, all.length];
}

/** What has been sent by now, in buffers. */
function traffic(run, t) {
  const pairs = {};
  const out = Array(run.n).fill(0);
  const into = [...out];
  for (const m of run.messages.filter(m => m.a < t - EPS)) {
    pairs[m.pair] = (pairs[m.pair] || 0) + m.share;
    out[m.src] += m.share;
    into[m.dst] += m.share;
  }
  return { pairs, out, into };
}

function busiest({ out, into }) {
  const most = max(...out, ...into);
  const at = list => list.findIndex(x => x > most - 1e-9);
  return [at(out) < 0 ? "into rank " + at(into) : "out of rank " + at(out), most];
}

// # chunk bars
/** Hollow where missing, hatched where double. */
function segments(v, w, h) {
  if (!v) return rect([1, h / 2 - 1, w - 2, 1.5], 'class="lk-unk"');
  const p = h >= 8 ? 2 : 0;
  const sw = (w - 2 * p) / v.length;
  const gap = sw >= 5 ? 1 : sw >= 3 ? 0.6 : 0;
  const drawn = v.map((x, k) => {
    if (!(x > 0)) return "";
    const tall = x > 1 ? h + 3 : max(0.3, x) * (h - 2 * p);
    const box = [p + k * sw + gap / 2, x > 1 ? -1.5 : h - p - tall, sw - gap, tall];
    return bar(box, x, `rx="${p / 2}" fill="${color(k)}"`);
  });
  return drawn.join("");
}

function label(v, short) {
  if (!v) return "?";
  const some = v.filter(x => x > 0);
  const most = max(...v);
  if (most > 1) return "×" + +most.toFixed(2);
  if (most > 0 && most < 1) return short ? "~" : "mean";
  return short ? some.length : `${some.length}/${v.length}`;
}

/** A chunk's bar; note: where its number stands. Returns what paints it. */
function chunkBar(parent, [x, y, w, h], note) {
  const g = make("g", parent, { transform: `translate(${x},${y})` });
  const box = { width: w, height: h, rx: min(4, h / 3), "stroke-width": h < 6 ? 1 : 1.5 };
  const track = make("rect", g, box);
  const inner = make("g", g);
  const text = note && make("text", g, { x: note.x, y: note.y, "text-anchor": note.anchor || "start" });
  let last, mark;
  return (v, done, now = "") => {
    if (now !== mark) track.setAttribute("class", "lk-track " + now);
    mark = now;
    if (v === last) return;
    last = v;
    inner.innerHTML = segments(v, w, h);
    if (!text) return;
    text.textContent = label(v, note.short);
    text.setAttribute("class", "lk-num" + (!v || max(...v) > 1 ? " bad" : done ? " done" : ""));
  };
}

// # layout
function sizes({ n, c, most }, W, style) {
  const wide = W >= 560;
  const [full, mini] = [style === "full", style === "mini"];
  const perRank = mini ? 36 / max(n, 6) : n <= 8 ? (wide ? 6 : 4) : wide ? 3 : 2;
  const barW = full ? (wide ? 76 : 50) : n * perRank;
  const compactH = mini ? 36 / max(c, 6) : c <= 8 ? 6.5 : wide ? 4 : 3;
  const rowH = full ? (c > 6 ? 14 : 19) : compactH;
  const one = full ? 11 : 5;
  const ih = most === 1 ? one : max(1.5, min(full ? 8 : 4, (full ? 40 : 26) / most - 1));
  const mw = max(14, barW * 0.7);
  return {
    ...{ full, mini, barW, rowH, mw, ih },
    barH: rowH - (full ? 6 : 1),
    head: full ? 29 : 17,
    pad: full ? (wide ? 17 : 14) : 4,
    cw: full ? barW + (wide ? 60 : 53) : max(24, barW + 8),
    ch: (full ? 33 : 20) + c * rowH,
    bw: mw + 8,
    bh: most * (ih + 1) + 6,
    travel: full ? 34 : mini ? 8 : 14,
    gap: mini ? 2 : 7,
  };
}

/** n places clockwise from the top middle: [x, row]. */
function racetrack(n, W, cw, need) {
  let s = n === 3 ? 0 : 1;
  let a, b, inset;
  for (; ; s++) {
    a = floor((n - 2 * s) / 2);
    b = n - 2 * s - a;
    inset = [0.14, 0.14, 0.16, 0.03][b] || 0;
    if (b <= 1 || ((W - cw) * (1 - 2 * inset)) / (b - 1) >= need) break;
  }
  const x = u => cw / 2 + (W - cw) * u;
  const row = (k, y) => range(k, i => [x(k === 1 ? 0.5 : inset + ((1 - 2 * inset) * i) / (k - 1)), y]);
  const top = a ? 1 : 0;
  const side = u => range(s, j => [x(u), top + j]);
  const first = n === 2 ? 1 : max(0, a - 1) >> 1;
  const places = [...row(a, 0), ...side(1), ...row(b, top + s).reverse(), ...side(0).reverse()];
  return [...places.slice(first), ...places.slice(0, first)];
}

/** The part of a link where a bar touches neither card. */
function track({ xy, size, mid, kind }, pair, { n, both }, bw, bh) {
  const [a, b] = pair.split(",");
  const [A, B] = [xy[a], xy[b]];
  const d = [B[0] - A[0], B[1] - A[1]];
  const len = hypot(...d) || 1;
  const chord = kind === "mesh" && ![1, n - 1].includes((b - a + n) % n) ? 0.35 : 0; // curves in towards the middle
  const lane = both.has(pair) ? (abs(d[1]) > abs(d[0]) ? size.bw : size.bh) + 6 : 0; // two ways: two lanes
  const bend = i => ((i ? d[0] : -d[1]) / len) * lane;
  const C = [0, 1].map(i => ((A[i] + B[i]) / 2) * (1 - chord) + mid[i] * chord + bend(i));
  const at = u => [0, 1].map(i => (1 - u) ** 2 * A[i] + 2 * u * (1 - u) * C[i] + u * u * B[i]);
  const near = (p, P, i, card, own) => abs(p[i] - P[i]) < (card + own) / 2 + 4;
  const hits = (p, P) => near(p, P, 0, size.cw, bw) && near(p, P, 1, size.ch, bh);
  let [u0, u1] = [0, 1];
  while (u0 < 1 && hits(at(u0), A)) u0 += 0.01;
  while (u1 > 0 && hits(at(u1), B)) u1 -= 0.01;
  const room = u1 > u0 ? hypot(at(u1)[0] - at(u0)[0], at(u1)[1] - at(u0)[1]) : 0;
  return { room, at: f => at(u0 + (u1 - u0) * f) };
}

function fits(run, plan) {
  const { xy, size } = plan;
  const far = (A, B) => abs(A[0] - B[0]) >= size.cw + size.gap || abs(A[1] - B[1]) >= size.ch + size.gap;
  if (!xy.every((A, a) => xy.slice(0, a).every(B => far(A, B)))) return false;
  plan.ways = Object.fromEntries(run.links.map(p => [p, track(plan, p, run, size.bw, size.bh)]));
  return Object.values(plan.ways).every(way => way.room >= size.travel);
}

/** The lowest plan with room for all, or null. */
function arrange(run, W, style, shape = run.shape, inner = 0) {
  const size = sizes(run, W, style);
  const { cw, ch, bw, bh } = size;
  const { kind } = shape;
  const tree = kind === "tree";
  const hub = tree ? -1 : shape.hub;
  const ranks = range(run.n).filter(r => r !== hub);
  const use = kind === "ring" && run.n <= 4 ? min(W, cw * 4.4) : W;
  const levels = () => ranks.map(r => [cw / 2 + (W - cw) * shape.slot[r], shape.depth[r]]);
  const around = () =>
    racetrack(ranks.length, use, cw, cw + bw + size.travel + 12).map(([x, y]) => [x + (W - use) / 2, y]);
  const places = tree ? levels() : around();
  const rows = max(...places.map(p => p[1]));
  for (let v = ch * (ranks.length <= 6 && !tree ? 0.62 : 1) + 8; v <= ch + bh + 150; v += 6) {
    const H = rows * v + ch + 4;
    const plan = { kind, size, W, H, mid: [W / 2, H / 2], xy: [] };
    ranks.forEach((r, i) => (plan.xy[r] = [places[i][0], ch / 2 + 2 + places[i][1] * v]));
    if (hub >= 0) plan.xy[hub] = plan.mid;
    if ((!inner || H - 2 * ch - 2 * bh >= inner) && fits(run, plan)) return plan;
  }
  return null;
}

const anyhow = (run, W, style) => {
  return arrange(run, W, style) || arrange(run, W, style, { kind: "mesh", hub: run.shape.hub });
};

/** Full cards if they fit, else columns of bars and one card beside them. */
function planFor(run, W) {
  // Between cards without links, what stands in the middle has no other room.
  const full = run.n <= 8 && arrange(run, W, "full", run.shape, run.links.length ? 0 : 24);
  const ring = run.shape.kind === "ring";
  if (full && full.H <= max(610, W * 0.8)) return { ...full, where: ring && run.n > 2 ? "centred" : "" };
  const barW = max(72, run.n * 6);
  const card = { barW, full: true, rowH: 13, barH: 9, head: 28, pad: 16, cw: barW + 62, ch: 34 + run.c * 13 };
  const centred = ring && arrange(run, W, "compact", run.shape, card.ch + 76);
  if (centred && W - 2 * centred.size.cw - centred.size.bw >= card.cw) return { ...centred, card, where: "centred" };
  const w = W >= 600 ? W - card.cw - 20 : W;
  const plan = anyhow(run, w, "compact");
  return plan && { ...plan, card, where: w < W ? "over" : "" };
}

// # stages
function drawCard(parent, r, [x, y], { c }, size) {
  const { full, pad, barW, barH } = size;
  const g = make("g.lk-card", parent, { transform: `translate(${x},${y})`, "data-rank": r });
  make("rect.lk-box", g, { width: size.cw, height: size.ch, rx: full ? 10 : 5 });
  if (full) make("circle", g, { cx: pad + 5, cy: 15, r: 5, fill: color(r) });
  else make("rect", g, { x: pad, y: 12, width: barW, height: 2, fill: color(r) });
  const at = { x: pad + (full ? 15 : 0), y: full ? 19.5 : 9.5 };
  make(full ? "text.lk-rank" : "text.lk-tiny", g, at, full ? `rank ${r}` : r);
  return range(c, k => {
    const y = size.head + k * size.rowH;
    if (full) make("text.lk-tiny", g, { x: pad - 4, y: y + barH / 2 + 4, "text-anchor": "end" }, k);
    return chunkBar(g, [pad, y, barW, barH], full && { x: barW + 5, y: barH / 2 + 4 });
  });
}

function counter(parent, where) {
  const words = make("div", make("div", parent, { class: "lk-mid " + where }));
  return [make("b", words), make("span", words), make("span", words)];
}

/** Cards on a ring or tree, and bars that travel between them; no pick: small, for a race. */
function ringStage(parent, run, W, name, pick) {
  const plan = pick ? planFor(run, W) : anyhow(run, W, "mini");
  if (!plan) return null;
  const { size, card } = plan;
  const count = pick ? counter(parent, plan.where) : null;
  const { rest, move } = canvas(parent, plan.W, plan.H, { "aria-label": name });
  const lines = {};
  for (const pair of run.links) {
    const way = track(plan, pair, run, 0, 0);
    const points = range(17, i =>
      way
        .at(i / 16)
        .map(v => v.toFixed(1))
        .join(" "),
    );
    lines[pair] = make("path.lk-link", rest, { d: "M" + points.join("L") });
  }
  const cells = plan.xy.map(([x, y], r) => drawCard(rest, r, [x - size.cw / 2, y - size.ch / 2], run, size));
  const draw = (g, m) => {
    const h = m.items.length * (size.ih + 1) + 5;
    make("rect", g, { x: -size.bw / 2, y: -h / 2, width: size.bw, height: h, rx: min(6, h / 3) });
    m.items.forEach((i, j) => {
      chunkBar(g, [-size.mw / 2, -h / 2 + 3 + j * (size.ih + 1), size.mw, size.ih])(i.sent);
    });
  };
  const moving = movers(move, draw, (m, f) => plan.ways[m.pair].at(f));
  const large = card && largeCard(count[0].parentNode.parentNode, rest, run, card, pick);
  return { cells, lines, count, thin: size.rowH < 9, move: moving, large };
}

/** One rank with its numbers. */
function largeCard(parent, rest, run, size, pick) {
  let shown, cells;
  rest.onpointerover = e => {
    const g = e.target.closest(".lk-card");
    if (g) pick(+g.dataset.rank);
  };
  return r => {
    if (r === shown) return cells;
    shown = r;
    parent.querySelector(".lk-stage")?.remove();
    for (const g of rest.querySelectorAll(".lk-card")) g.classList.toggle("on", +g.dataset.rank === r);
    const own = canvas(parent, size.cw + 2, size.ch + 2, { "aria-label": `rank ${r}` }).rest;
    cells = drawCard(own, r, [1, 1], run, size);
    return cells;
  };
}

/** Bars under way. */
function movers(parent, draw, place) {
  const shown = new Map();
  return flying => {
    for (const [m, g] of shown) {
      if (flying.has(m)) continue;
      g.remove();
      shown.delete(m);
    }
    for (const [m, f] of flying) {
      if (!shown.has(m)) {
        shown.set(m, make("g.lk-mover", parent));
        draw(shown.get(m), m);
      }
      shown.get(m).setAttribute("transform", `translate(${place(m, f).map(v => v.toFixed(2))})`);
    }
  };
}

/** A row per rank, a column per chunk. */
function matrixStage(parent, run, W, name, pick) {
  const mini = !pick;
  const [left, top] = mini ? [12, 4] : [42, 20];
  const cw = (W - left) / run.c;
  const beside = !mini && cw >= 78;
  const text = !mini && cw >= 17;
  const barH = mini ? max(3, min(9, 110 / run.n - 2)) : run.n <= 8 ? 13 : 8;
  const rowH = barH + (mini ? 2 : beside || !text ? 9 : 17);
  const barW = max(2, cw - (beside ? 40 : min(8, cw * 0.16)));
  const count = mini ? null : counter(parent, "");
  const { rest, move } = canvas(parent, W, top + run.n * rowH + 4, { "aria-label": name });
  const x = c => left + max(0, c) * cw;
  const y = r => top + r * rowH;
  const below = { x: barW / 2, y: barH + 11, short: true, anchor: "middle" };
  const note = text && (beside ? { x: barW + 5, y: barH - 2 } : below);
  for (let c = 0; text && c < run.c; c++) {
    const at = { x: x(c) + barW / 2, y: top - 8, "text-anchor": "middle" };
    make("text.lk-tiny", rest, at, beside ? `chunk ${c}` : c);
  }
  const cells = range(run.n, r => {
    make("circle", rest, { cx: 5, cy: y(r) + barH / 2, r: mini ? 3 : 4, fill: color(r) });
    if (!mini && rowH >= 12) make("text.lk-tiny", rest, { x: 14, y: y(r) + barH / 2 + 4 }, r);
    return range(run.c, c => chunkBar(rest, [x(c), y(r), barW, barH], note));
  });
  const draw = (g, m) => {
    for (const i of m.items) {
      make("rect", g, { x: x(i.chunk) - 2, y: -2, width: barW + 4, height: barH + 4, rx: 4 });
      chunkBar(g, [x(i.chunk), 0, barW, barH])(i.sent);
    }
  };
  return { cells, count, matrix: true, move: movers(move, draw, (m, f) => [0, y(m.src + (m.dst - m.src) * f)]) };
}

const stageOf = (view, ...how) => (view === "ring" && ringStage(...how)) || matrixStage(...how);

function easeOff(f) {
  const u = min(1, f / 0.85);
  return u * u * (3 - 2 * u);
}

function drawStage(stage, run, t, clock, focus) {
  const flying = new Map();
  const [out, used] = [new Set(), new Set()];
  const steps = clock === "steps";
  const rest = steps && t % 1 === 0 && t > 0;
  for (const m of run.messages) {
    const f = (t - m.a) / (m.b - m.a);
    const under = f > 1e-9 && f < 1 - 1e-9;
    if (under || (rest && m.b === t)) used.add(m.pair);
    if (!under) continue;
    flying.set(m, steps ? easeOff(f) : f);
    if (m.items.length < run.c || !stage.thin) {
      for (const i of m.items) if (i.chunk !== null) out.add(i.src * run.c + i.chunk);
    }
  }
  stage.move(flying);
  const big = stage.large?.(focus);
  stage.cells.forEach((row, r) => {
    row.forEach((cell, c) => {
      const u = latest(run, r, c, t);
      const look = out.has(r * run.c + c) ? "out" : rest && u.k === t ? "in" : "";
      const wrong = t >= run.stops[run.wrong(r, c)] - EPS ? " wrong" : "";
      const now = [u.v, complete(run, r, c, u.v), look + wrong];
      cell(...now);
      if (r === focus) big?.[c](...now);
    });
  });
  const now = traffic(run, t).pairs;
  const most = max(...Object.values(traffic(run, Infinity).pairs));
  // As thick as the bytes it carried.
  for (const pair in stage.lines) {
    stage.lines[pair].classList.toggle("on", used.has(pair));
    stage.lines[pair].style.strokeWidth = 1.5 + (3.5 * (now[pair] || 0)) / most;
  }
}

export {
  decode, gather, retime, tally, traffic, busiest, chunkBar, drawStage, endOf, latest,
  stageOf,
};
