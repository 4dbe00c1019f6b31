/* Lockstep's chunk player: draws what a trace says, and nothing that it does not say.

   One file, no build step, no dependencies, no network. Loaded as a deferred script it mounts every
   [data-lockstep-player] on the page; in a notebook `export default lockstepPlayer` is appended and anywidget calls
   render(). What payload.py writes is read here word for word: the player never works out what a chunk should hold. */
(() => {
"use strict";
const NS = "http://www.w3.org/2000/svg", TICKS = 1e4, EPS = 1e-12;
const range = (n) => [...Array(n).keys()], sum = (list) => list.reduce((a, b) => a + b, 0);
let uid = 0;

function make(tag, attrs, parent, text) { // an element, or with "s:" before its name an SVG one
  const e = tag.startsWith("s:") ? document.createElementNS(NS, tag.slice(2)) : document.createElement(tag);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  if (text !== undefined) e.textContent = text;
  parent?.append(e);
  return e;
}

// ---- data: the payload's words -> messages and contents
function reader(n) { // equal texts give the same array: drawing compares by identity
  const seen = {}, bits = (s) => range(n).map((r) => (parseInt(s[r >> 2] || "0", 16) >> (r & 3)) & 1);
  const read = (s) => (s === "?" ? null : s[0] === "(" ? s.slice(1, -1).split(",").map(Number) : bits(s));
  return (s) => (s in seen ? seen[s] : (seen[s] = read(s)));
}

function parse(m, held, read, k) {
  const num = (s) => (s[0] === "-" ? -1 : parseInt(s, 36)), [src, dst, chunk] = m.slice(1, 4).map(num);
  const sent = m[6] !== undefined ? read(m[6]) : chunk < 0 ? null : held[src][chunk];
  return { src, dst, chunk, op: m[4], sent, k, end: +(m[8] ?? k) + 1,
    after: m[5] ? read(m[5]) : sent, into: m[4] === "!" ? -1 : m[7] ? num(m[7]) : chunk };
}

function decode(data) {
  const read = reader(data.n), own = (r) => read("0".repeat(r >> 2) + (1 << (r & 3)).toString(16)), items = [];
  const held = range(data.n).map((r) => (data.start === "own" ? Array(data.c).fill(own(r)) : data.start[r].split("/").map(read)));
  const word = new RegExp("^(.{W})(.{W})(.{W})([+=?!])([^~@^]*)(?:~([^@^]*))?(?:@([^^]*))?(?:\\^(\\d+))?$".replaceAll("W", data.width));
  const run = { ...data, S: data.steps.length, items, updates: held.map((row) => row.map((v) => [{ k: 0, s: 0, v }])) };
  const put = (r, c, v, k, s) => { held[r][c] = v; run.updates[r][c].push({ k, s, v }); };
  const settle = (k) => { // what has arrived, or was changed by a rank itself, before step k
    for (const i of items) if (i.end === k && i.into >= 0) put(i.dst, i.into, i.after, k, i.s1);
    for (const [at, r, c, s] of data.holds || []) if (at === k) put(r, c, read(s), k, endOf(items, k));
  };
  data.steps.forEach((line, k) => {
    settle(k);
    const t = data.times?.[k];
    line.split(" ").filter(Boolean).forEach((text, j) => {
      const i = parse(word.exec(text), held, read, k), at = t && t.length > 2 ? 2 * j : 0;
      [i.s0, i.s1] = t ? [t[at], t[at + 1]].map((x) => (x / TICKS) * data.duration_s) : [k, k + 1];
      items.push(i);
    });
  });
  settle(run.S);
  return gather(run);
}
const endOf = (items, k) => Math.max(0, ...items.filter((i) => i.k < k).map((i) => i.s1));

function gather(run) { // items of one step, sender and receiver are one message
  const byKey = {}, at = new Set();
  for (const i of run.items) {
    const pair = `${i.src},${i.dst}`, share = run.shares?.[i.chunk] ?? 1 / run.c;
    const m = (byKey[[i.k, pair]] ??= { ...i, pair, key: `${i.k},${pair}`, items: [], share: 0 });
    m.items.push(i);
    m.s0 = Math.min(m.s0, i.s0); m.s1 = Math.max(m.s1, i.s1); m.share += share;
    at.add(m.key);
  }
  run.messages = Object.values(byKey);
  run.links = [...new Set(run.messages.map((m) => m.pair))];
  run.both = new Set(run.messages.filter((m) => at.has(`${m.k},${m.dst},${m.src}`)).map((m) => m.pair));
  run.most = Math.max(...run.messages.map((m) => m.items.length));
  return run;
}

function retime(run, clock) { // "steps": all equally long; "time": as long as modelled
  const timed = clock === "time";
  for (const m of run.messages) [m.a, m.b] = timed ? [m.s0, m.s1] : [m.k, m.end];
  for (const list of run.updates.flat()) { for (const u of list) u.at = timed ? u.s : u.k; list.sort((a, b) => a.at - b.at); }
  run.stops = range(run.S + 1);
  if (timed) run.stops = run.stops.map((k) => endOf(run.items, k));
  run.end = run.stops[run.S];
  return run;
}

function latest(run, r, c, t) {
  const list = run.updates[r][c];
  let i = list.length - 1;
  while (i > 0 && list[i].at > t + EPS) i--;
  return list[i];
}

const once = (v) => !!v && (v.every((x) => x === 1) || v.every((x) => Math.abs(x * v.length - 1) < 1e-3));
function complete(run, c, v) { // gathering alone: what the chunk's owner started with
  if (run.goal !== "all_gather") return once(v);
  const first = run.updates.map((row) => row[c][0].v).find((x) => x?.some((y) => y > 0));
  return !!v && !!first && v.every((x, i) => x === first[i]);
}
function tally(run, t) {
  const one = run.goal === "reduce_scatter";
  const per = range(run.c).map((c) => sum(range(run.n).map((r) => +complete(run, c, latest(run, r, c, t).v))));
  return [sum(per.map((x) => (one ? Math.min(1, x) : x))), run.c * (one ? 1 : run.n)];
}

function traffic(run, t) { // shares of the buffer on their way by now: per pair, out of each rank, and into it
  const pairs = Object.fromEntries(run.links.map((p) => [p, 0])), out = Array(run.n).fill(0), into = [...out];
  for (const m of run.messages) if (m.a < t - EPS) { pairs[m.pair] += m.share; out[m.src] += m.share; into[m.dst] += m.share; }
  return { pairs, out, into };
}
function busiest({ out, into }) { // a rank's link has two directions
  const most = Math.max(...out, ...into), at = (list) => list.findIndex((x) => x > most - 1e-9);
  return [at(out) < 0 ? "into rank " + at(into) : "out of rank " + at(out), most];
}

// ---- chunk bars: a segment per contributing rank
const rect = (box, rest) => { const [x, y, w, h] = box.map((v) => +v.toFixed(2)); return `<rect x="${x}" y="${y}" width="${w}" height="${h}" ${rest}/>`; };

function segments(v, w, h, hatch) { // hollow where missing, taller and hatched where counted more than once
  if (!v) return h > 9 ? `<text x="${w / 2}" y="${h - 1.5}" class="lk-unk" text-anchor="middle">?</text>` : rect([1, h / 2 - 0.5, w - 2, 1], 'class="lk-unk"');
  const p = h >= 8 ? 2 : 0, sw = (w - 2 * p) / v.length, gap = sw >= 5 ? 1 : sw >= 3 ? 0.6 : 0;
  return v.map((x, k) => {
    const tall = x > 1 ? h + 3 : Math.max(0.3, x) * (h - 2 * p), box = [p + k * sw + gap / 2, x > 1 ? -1.5 : h - p - tall, sw - gap, tall];
    return x > 0 ? rect(box, `rx="${p / 2}" fill="var(--r${k % 16})"`) + (x > 1 ? rect(box, `fill="url(#${hatch})"`) : "") : "";
  }).join("");
}

function label(v, short) {
  const some = v && v.filter((x) => x > 0), most = v && Math.max(...v);
  if (!v) return "?";
  if (most > 1) return "×" + +most.toFixed(2);
  if (some.length && some.every((x) => x < 1)) return short ? "~" : "mean";
  return short ? some.length : `${some.length}/${v.length}`;
}

function bar(parent, [x, y, w, h], hatch, note) { // note: {x, y, short, anchor}: the number beside it
  const g = make("s:g", { transform: `translate(${x},${y})` }, parent);
  const track = make("s:rect", { width: w, height: h, rx: Math.min(4, h / 3), class: "lk-track" }, g), inner = make("s:g", {}, g);
  const text = note && make("s:text", { x: note.x, y: note.y, "text-anchor": note.anchor || "start" }, g);
  let last, mark;
  return (v, done, now) => {
    if (now !== mark) track.setAttribute("class", "lk-track " + (mark = now));
    if (v === last) return;
    inner.innerHTML = segments((last = v), w, h, hatch);
    if (!text) return;
    text.textContent = label(v, note.short);
    text.setAttribute("class", "lk-num" + (!v || Math.max(...v) > 1 ? " bad" : done ? " done" : ""));
  };
}

// ---- layout: where cards stand and bars may travel
function sizes(run, W, style) {
  const { n, c, most } = run, wide = W >= 560;
  if (style === "full") {
    const barW = wide ? 76 : 50, rowH = c > 6 ? 14 : 19, ih = most > 1 ? Math.max(4, Math.min(8, 40 / most - 1)) : 11, mw = barW * 0.72;
    return { style, barW, rowH, barH: rowH - 6, head: 29, pad: wide ? 11 : 8, cw: barW + (wide ? 54 : 47), ch: 33 + c * rowH, mw, ih, bw: mw + 8, bh: most * (ih + 1) + 7, travel: 34, gap: 7 };
  }
  const mini = style === "mini", seg = mini ? 48 / Math.max(n, 6) : n <= 8 ? (wide ? 6 : 4) : wide ? 3 : 2;
  const rowH = mini ? 48 / Math.max(c, 6) : c <= 8 ? (wide ? 7 : 6) : wide ? 4 : 3, ih = most > 1 ? Math.max(1.5, Math.min(4, 26 / most - 1)) : 5, mw = Math.max(14, n * seg * 0.7);
  return { style, barW: n * seg, rowH, barH: rowH - 1, head: 17, pad: 4, cw: Math.max(24, n * seg + 8), ch: 20 + c * rowH, mw, ih, bw: mw + 6, bh: most * (ih + 1) + 5, travel: mini ? 8 : 14, gap: mini ? 2 : 7 };
}

function racetrack(n, W, cw, need) { // n places clockwise from the top middle: [x, row]
  let s = n === 3 ? 0 : 1, a, b, inset;
  for (; ; s++) {
    a = Math.floor((n - 2 * s) / 2); b = n - 2 * s - a;
    inset = [0.14, 0.14, 0.16, 0.03][b] || 0;
    if (b <= 1 || ((W - cw) * (1 - 2 * inset)) / (b - 1) >= need) break;
  }
  const spread = (k) => range(k).map((i) => cw / 2 + (W - cw) * (k === 1 ? 0.5 : inset + ((1 - 2 * inset) * i) / (k - 1)));
  const top = a ? 1 : 0, side = range(s).map((j) => top + j), first = Math.max(0, a - 1) >> 1;
  const places = [...spread(a).map((x) => [x, 0]), ...side.map((y) => [W - cw / 2, y]), ...spread(b).reverse().map((x) => [x, top + s]), ...side.reverse().map((y) => [cw / 2, y])];
  return places.slice(first).concat(places.slice(0, first));
}

function track(plan, pair, run, bw, bh) { // the part of the way on which a bar of bw x bh touches neither card
  const { xy, size, mid, kind } = plan, [a, b] = pair.split(",").map(Number), [A, B] = [xy[a], xy[b]], d = [B[0] - A[0], B[1] - A[1]], len = Math.hypot(...d) || 1;
  const chord = kind === "mesh" && ![1, run.n - 1].includes((b - a + run.n) % run.n) ? 0.35 : 0; // curves in towards the middle
  const lane = run.both.has(pair) ? (Math.abs(d[1]) > Math.abs(d[0]) ? size.bw : size.bh) + 6 : 0; // two ways at once: two lanes
  const C = [0, 1].map((i) => { const m = (A[i] + B[i]) / 2; return m + (mid[i] - m) * chord + ((i ? d[0] : -d[1]) / len) * lane; });
  const at = (u) => [0, 1].map((i) => (1 - u) ** 2 * A[i] + 2 * u * (1 - u) * C[i] + u * u * B[i]);
  const hits = ([x, y], [px, py]) => Math.abs(x - px) < (size.cw + bw) / 2 + 4 && Math.abs(y - py) < (size.ch + bh) / 2 + 4;
  let u0 = 0, u1 = 1;
  while (u0 < 1 && hits(at(u0), A)) u0 += 0.01;
  while (u1 > 0 && hits(at(u1), B)) u1 -= 0.01;
  if (u1 <= u0) return { at: (f) => at(0.4 + 0.2 * f), room: 0 };
  return { at: (f) => at(u0 + (u1 - u0) * f), room: Math.hypot(...[0, 1].map((i) => at(u1)[i] - at(u0)[i])) };
}

function fits(run, plan) {
  const { xy, size } = plan, far = (A, B) => Math.abs(A[0] - B[0]) >= size.cw + size.gap || Math.abs(A[1] - B[1]) >= size.ch + size.gap;
  if (!xy.every((A, a) => xy.slice(0, a).every((B) => far(A, B)))) return false;
  plan.tracks = new Map(run.links.map((p) => [p, track(plan, p, run, size.bw, size.bh)]));
  return [...plan.tracks.values()].every((t) => t.room >= size.travel);
}

function arrange(run, W, style, shape = run.shape, inner = 0) { // the lowest plan on which cards and bars have room, or null
  const size = sizes(run, W, style), { kind } = shape, tree = kind === "tree", hub = tree ? -1 : shape.hub, ranks = range(run.n).filter((r) => r !== hub);
  const use = kind === "ring" && run.n <= 4 ? Math.min(W, size.cw * 4.4) : W, x = (u) => size.cw / 2 + (W - size.cw) * u;
  const places = tree ? ranks.map((r) => [x(shape.slot[r]), shape.depth[r]]) : racetrack(ranks.length, use, size.cw, size.cw + size.bw + size.travel + 8).map(([px, row]) => [px + (W - use) / 2, row]);
  const rows = 1 + Math.max(...places.map((p) => p[1]));
  for (let v = size.ch * (places.length <= 6 && !tree ? 0.62 : 1) + 8; v <= size.ch + size.bh + 150; v += 6) {
    const plan = { kind, size, W, H: (rows - 1) * v + size.ch + 4, xy: [] };
    ranks.forEach((r, i) => (plan.xy[r] = [places[i][0], size.ch / 2 + 2 + places[i][1] * v]));
    plan.mid = [W / 2, plan.H / 2];
    if (hub >= 0) plan.xy[hub] = plan.mid;
    if (plan.H - 2 * size.ch - 2 * size.bh >= inner && fits(run, plan)) return plan;
  }
  return null;
}

const anyhow = (run, W, style) => arrange(run, W, style) || arrange(run, W, style, { kind: "star", hub: run.shape.hub }) || arrange(run, W, style, { kind: "mesh" });
const largeBox = (run) => { const barW = Math.max(72, run.n * 6); return { barW, rowH: 13, barH: 9, head: 28, pad: 10, cw: barW + 56, ch: 34 + run.c * 13 }; };
function plan(run, W) { // full cards if they fit, else columns of bars with one rank shown large
  const full = run.n <= 8 && arrange(run, W, "full"), box = largeBox(run), ring = run.shape.kind === "ring";
  if (full && full.H <= Math.max(610, W * 0.8)) return { ...full, centred: ring && run.n > 2 };
  const centred = ring && arrange(run, W, "compact", run.shape, box.ch + 76);
  if (centred && W - 2 * centred.size.cw - centred.size.bw >= box.cw) return { ...centred, centred: true, box };
  const w = W >= 600 ? W - box.cw - 20 : W, rest = anyhow(run, w, "compact");
  return rest && { ...rest, box, below: w === W };
}

// ---- stages: the ring of cards, and the matrix
function canvas(parent, W, H, name) { // two layers: what rests, and above it what moves
  const box = make("div", { class: "lk-stage", style: `width:${W}px;height:${Math.ceil(H)}px` }, parent), hatch = `lk-hatch-${++uid}`;
  const rest = make("s:svg", { width: W, height: H, role: "img", "aria-label": name }, box);
  rest.innerHTML = `<defs><pattern id="${hatch}" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="1.6" height="4" class="lk-hatch"/></pattern></defs>`;
  return { box, rest, hatch, move: make("s:svg", { width: W, height: H, "aria-hidden": "true", class: "lk-move" }, box) };
}

function card(parent, r, [x, y], run, size, hatch, full) {
  const g = make("s:g", { transform: `translate(${x},${y})`, class: "lk-card", "data-rank": r }, parent);
  make("s:rect", { width: size.cw, height: size.ch, rx: full ? 10 : 5, class: "lk-box" }, g);
  if (full) make("s:circle", { cx: size.pad + 5, cy: 15, r: 5, fill: `var(--r${r % 16})` }, g);
  else make("s:rect", { x: size.pad, y: 12, width: size.barW, height: 2, fill: `var(--r${r % 16})` }, g);
  make("s:text", { x: size.pad + (full ? 15 : 0), y: full ? 19.5 : 9.5, class: full ? "lk-rank" : "lk-tiny" }, g, full ? `rank ${r}` : r);
  return range(run.c).map((c) => bar(g, [size.pad, size.head + c * size.rowH, size.barW, size.barH], hatch, full && { x: size.barW + 5, y: size.barH }));
}

function counter(parent, style) {
  const box = make("div", { class: "lk-mid " + style }, parent), words = make("div", {}, box);
  return { box, step: make("b", {}, words), phase: make("span", {}, words) };
}

function ringStage(parent, run, W, name, mini, pick) {
  const p = mini ? anyhow(run, W, "mini") : plan(run, W);
  if (!p) return null;
  const { size } = p, full = size.style === "full", count = mini ? null : counter(parent, p.centred ? "centred" : p.below ? "" : "over");
  const ui = canvas(parent, p.W, p.H, name), lines = new Map();
  for (const pair of run.links) {
    const way = track(p, pair, run, 0, 0), points = range(17).map((i) => way.at(i / 16).map((v) => v.toFixed(1)).join(" "));
    lines.set(pair, make("s:path", { d: "M" + points.join("L"), class: "lk-link", "data-link": pair }, ui.rest));
  }
  const cells = p.xy.map(([x, y], r) => card(ui.rest, r, [x - size.cw / 2, y - size.ch / 2], run, size, ui.hatch, full));
  const draw = (g, m) => {
    const w = size.bw, h = m.items.length * (size.ih + 1) + 5;
    make("s:rect", { x: -w / 2, y: -h / 2, width: w, height: h, rx: Math.min(6, h / 3) }, g);
    m.items.forEach((i, j) => bar(g, [-size.mw / 2, -h / 2 + 3 + j * (size.ih + 1), size.mw, size.ih], ui.hatch)(i.sent, false, ""));
  };
  return { cells, lines, count, thin: size.rowH < 9, move: movers(ui.move, draw, (m, f) => p.tracks.get(m.pair).at(f)), large: p.box && large(count.box, ui.rest, run, p.box, pick) };
}

function large(parent, rest, run, box, pick) { // one rank with its numbers; pointer or arrow keys choose which
  let shown, cells;
  const choose = (e) => { const g = e.target.closest(".lk-card"); if (g) pick(+g.dataset.rank); };
  for (const type of ["pointerover", "click"]) rest.addEventListener(type, choose);
  return (r) => {
    if (r === shown) return cells;
    parent.querySelector(".lk-stage")?.remove();
    const ui = canvas(parent, box.cw + 2, box.ch + 2, `rank ${r}`);
    for (const g of rest.querySelectorAll(".lk-card")) g.classList.toggle("on", +g.dataset.rank === r);
    shown = r;
    return (cells = card(ui.rest, r, [1, 1], run, box, ui.hatch, true));
  };
}

function movers(parent, draw, place) { // bars under way: made when they leave, taken away when they arrive
  const shown = new Map();
  return (flying) => {
    for (const [m, g] of shown) if (!flying.has(m)) { g.remove(); shown.delete(m); }
    for (const [m, f] of flying) {
      if (!shown.has(m)) { const g = make("s:g", { class: "lk-mover" }, parent); draw(g, m); shown.set(m, g); }
      shown.get(m).setAttribute("transform", `translate(${place(m, f).map((v) => v.toFixed(2))})`);
    }
  };
}

function matrixStage(parent, run, W, name, mini) { // a row per rank, a column per chunk
  const left = mini ? 12 : 42, top = mini ? 4 : 20, cw = (W - left) / run.c, beside = !mini && cw >= 78, text = !mini && cw >= 17;
  const barH = mini ? Math.max(3, Math.min(9, 110 / run.n - 2)) : run.n <= 8 ? 13 : 8, rowH = barH + (mini ? 2 : beside || !text ? 9 : 17);
  const count = mini ? null : counter(parent, ""), ui = canvas(parent, W, top + run.n * rowH + 4, name), barW = Math.max(2, cw - (beside ? 40 : Math.min(8, cw * 0.16)));
  const x = (c) => left + Math.max(0, c) * cw, y = (r) => top + r * rowH, note = text && (beside ? { x: barW + 5, y: barH - 2 } : { x: barW / 2, y: barH + 11, short: true, anchor: "middle" });
  if (text) for (const c of range(run.c)) make("s:text", { x: x(c) + barW / 2, y: top - 8, class: "lk-tiny", "text-anchor": "middle" }, ui.rest, beside ? `chunk ${c}` : c);
  const cells = range(run.n).map((r) => {
    make("s:circle", { cx: 5, cy: y(r) + barH / 2, r: mini ? 3 : 4, fill: `var(--r${r % 16})` }, ui.rest);
    if (!mini && rowH >= 12) make("s:text", { x: 14, y: y(r) + barH / 2 + 4, class: "lk-tiny" }, ui.rest, r);
    return range(run.c).map((c) => bar(ui.rest, [x(c), y(r), barW, barH], ui.hatch, note));
  });
  const draw = (g, m) => { for (const i of m.items) { make("s:rect", { x: x(i.chunk) - 2, y: -2, width: barW + 4, height: barH + 4, rx: 4 }, g); bar(g, [x(i.chunk), 0, barW, barH], ui.hatch)(i.sent, false, ""); } };
  return { cells, count, matrix: true, move: movers(ui.move, draw, (m, f) => [0, y(m.src + (m.dst - m.src) * f)]) };
}

const ease = (f) => { const u = Math.min(1, f / 0.85); return u < 0.5 ? 4 * u ** 3 : 1 - (2 - 2 * u) ** 3 / 2; };
function drawStage(stage, run, t, clock, focus) {
  const flying = new Map(), out = new Set(), used = new Set(), rest = clock === "steps" && Number.isInteger(t) && t > 0;
  for (const m of run.messages) {
    if (rest && m.b === t) used.add(m.pair);
    if (!(t > m.a + EPS && t < m.b - EPS)) continue;
    used.add(m.pair);
    flying.set(m, (clock === "steps" ? ease : (f) => f)((t - m.a) / (m.b - m.a)));
    if (m.items.length < run.c || !stage.thin) for (const i of m.items) out.add(i.src * run.c + i.chunk);
  }
  stage.move(flying);
  const big = stage.large?.(focus);
  stage.cells.forEach((row, r) => row.forEach((cell, c) => {
    const u = latest(run, r, c, t), done = complete(run, c, u.v), mark = out.has(r * run.c + c) ? "out" : rest && u.k === t ? "in" : "";
    cell(u.v, done, mark);
    if (big && r === focus) big[c](u.v, done, mark);
  }));
  if (!stage.lines) return;
  const now = traffic(run, t).pairs, most = Math.max(...Object.values(traffic(run, Infinity).pairs));
  for (const [pair, line] of stage.lines) { // a link is as thick as the bytes that it has carried
    line.setAttribute("class", used.has(pair) ? "lk-link on" : "lk-link");
    line.style.strokeWidth = (1.5 + (3.5 * now[pair]) / most).toFixed(2);
  }
}

// ---- words and figures
const and = (list) => (list.length < 2 ? list.join("") : list.slice(0, -1).join(", ") + " and " + list.at(-1));
const number = (x) => ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"][x] || String(x);
const capital = (s) => s[0].toUpperCase() + s.slice(1), inN = (x) => x.toFixed(2) + " n";
const whose = (v) => (v ? and(v.map((x, r) => [x, r]).filter(([x]) => x > 0).map(([x, r]) => r + (x === 1 ? "" : ` ×${+x.toFixed(2)}`))) || "nobody" : "unknown");
const scaled = (x, units) => { let i = 0; while (x >= 999.5 && i < units.length - 1) { x /= 1000; i++; } return `${x.toPrecision(3)} ${units[i]}`; };
const seconds = (s) => scaled(s * 1e6, ["µs", "ms", "s"]);

function chunksOf(items) {
  const list = items.map((i) => i.chunk).sort((a, b) => a - b), n = list.length;
  if (list[0] < 0) return "something unwatched";
  return n === 1 ? "chunk " + list[0] : "chunks " + (n > 2 && list[n - 1] - list[0] === n - 1 ? `${list[0]}–${list[n - 1]}` : and(list));
}

function sentence(run, k) { // [who sends what, the rest]
  const all = run.messages.filter((m) => m.k === k), m = all[0], it = m.items.length > 1 ? "them" : "it", wrong = m.items.find((i) => i.into >= 0 && i.into !== i.chunk);
  const own = wrong ? `its chunk ${wrong.into}` : "its own", bad = run.items.find((i) => i.k === k && i.into >= 0 && i.after?.some((x) => x > 1));
  const does = { "+": `which adds ${it} to ${own}`, "=": `which puts ${it} in place of ${own}`, "?": "which receives " + it, "!": "and nobody receives " + it }[m.op];
  const fault = bad ? ` Rank ${bad.dst}'s chunk ${bad.into} now counts rank ${bad.after.findIndex((x) => x > 1)} more than once.` : "";
  return [`rank ${m.src} sends ${chunksOf(m.items)} to rank ${m.dst}`, `, ${does}. ${others(run, all)}${fault}`];
}

function others(run, all) {
  const L = all.length, each = all[0].items.length, one = (end) => all.every((m) => m[end] === all[0][end]);
  if (L === 1) return run.links.length > 1 ? "Every other link is idle." : "";
  if (one("dst")) return `${capital(number(L))} ranks send to rank ${all[0].dst} through its one link.`;
  if (one("src")) return `It sends to ${number(L)} ranks through its one link.`;
  const what = !all.every((m) => m.items.length === each) ? "chunks" : each === 1 ? "one chunk" : number(each) + " chunks";
  return `${L === run.links.length ? "All " + number(L) : capital(number(L))} links carry ${what} at once.`;
}

function figures(run, t, k) { // the row of numbers: [value, meaning]
  const now = traffic(run, t), [done, all] = tally(run, t), [link, most] = busiest(now);
  const sent = run.who < 0 ? [Math.max(...now.out), "sent per rank, so far"] : [now.out[run.who], `sent by rank ${run.who}, so far`];
  return [[`${k} / ${run.S}`, "rounds"], [inN(sent[0]), sent[1]], [inN(run.total), "at the end" + run.formula], [`${done} / ${all}`, "chunks complete"], [inN(most), "busiest link" + (t ? ", " + link : "")]];
}

function linkTexts(run, t) {
  const { out, into } = traffic(run, t), size = (x) => (run.bytes ? scaled(x * run.bytes, ["B", "kB", "MB", "GB"]) : inN(x));
  return out.map((x, r) => `rank ${r}: ${size(x)} out, ${size(into[r])} in`);
}

// ---- prediction: choose before it moves
function question(run, k) { // by turns: which chunk goes, and what a chunk will hold
  const all = run.messages.filter((m) => m.k === k && m.into >= 0), i = all[(k * 3) % all.length]?.items[0];
  if (!i) return null;
  const before = latest(run, i.dst, i.into, run.stops[k]).v, got = run.items.find((j) => j.end === k && j.dst === i.src && j.into === i.chunk);
  if (k % 2 === 0 && run.most === 1 && run.c > 1) return {
    text: `Which chunk does rank ${i.src} send to rank ${i.dst} next?`,
    options: range(Math.min(5, run.c)).map((d) => (i.chunk + d) % run.c).sort((a, b) => a - b).map((c) => ["chunk " + c, c === i.chunk]),
    why: `rank ${i.src} ${got ? `passes on chunk ${i.chunk}, which it got from rank ${got.src} a step ago` : `sends chunk ${i.chunk}, with data of rank ${whose(i.sent)}`}.` };
  const added = before && i.sent && before.map((x, r) => x + i.sent[r]), all1 = before && before.map(() => 1);
  const texts = [...new Set([i.after, added, i.sent, before, all1].map(whose))].slice(0, 4);
  return { text: `Whose data will rank ${i.dst}'s chunk ${i.into} hold after this step?`, options: texts.sort().map((text) => [text, text === whose(i.after)]),
    why: i.op === "=" ? `what arrives (${whose(i.sent)}) takes the place of what was there.` : `it held ${whose(before)}, ${whose(i.sent)} arrives: now it holds ${whose(i.after)}.` };
}

function quiz(parent, onAnswer) {
  const box = make("div", { class: "lk-quiz" }, parent), ask = make("p", {}, box), options = make("div", { class: "lk-options" }, box), said = make("p", { role: "status" }, box);
  let at, right = 0, asked = 0;
  const answer = (why, ok) => {
    asked++; right += ok;
    said.className = ok ? "ok" : "no";
    said.textContent = `${ok ? "Right" : "Not quite"}: ${why} ${right} of ${asked} right.`;
    onAnswer();
  };
  return (run, k, key, on, waiting) => {
    box.hidden = !on;
    if (key + waiting === at) return;
    at = key + waiting;
    const q = waiting && k < run.S ? question(run, k) : null, held = options.contains(document.activeElement);
    ask.textContent = q ? q.text : k < run.S ? "…" : "That was the last step.";
    options.replaceChildren(...(q ? q.options : []).map(([text, ok]) => pill(null, text, "", () => answer(q.why, ok), ok)));
    if (q && held !== false || box.dataset.keep) options.firstChild?.focus({ preventScroll: true });
    box.dataset.keep = held || (!q && box.dataset.keep) ? "1" : "";
  };
}

// ---- transport: where we are, and how it moves on
const ICONS = { start: "M4 3h2v10H4zM13 3 7 8l6 5z", back: "M10 3 5 8l5 5z", play: "M5 3l8 5-8 5z", pause: "M4 3h3v10H4zM9 3h3v10H9z", next: "M6 3l5 5-5 5z" };
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function transport(parent, state, draw) { // state: t, speed, playing, and functions stops, rate (per second), wait
  let frame = 0, last = 0, until;
  const icon = (b, name, words) => { b.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`; b.setAttribute("aria-label", words); b.title = words; };
  const button = (name, words, act) => { const b = pill(parent, "", words, act); b.className = "lk-btn " + name; icon(b, name, words); return b; };
  const end = () => state.stops().at(-1), near = () => 1e-9 * end(), after = () => state.stops().find((s) => s > state.t + near());
  const halt = () => { cancelAnimationFrame(frame); state.playing = false; };
  const tick = (now) => {
    if (still()) { if (!last || now - last > 900 / state.speed) { last = now; state.t = after() ?? end(); } }
    else { state.t = Math.min(until, state.t + (last ? Math.min(0.1, (now - last) / 1000) : 0) * state.rate() * state.speed); last = now; }
    if (state.t >= until - near()) { state.t = until; halt(); } else frame = requestAnimationFrame(tick);
    draw();
  };
  const run = (goal) => { halt(); until = goal; last = 0; state.playing = true; frame = requestAnimationFrame(tick); draw(); };
  const go = (t) => { halt(); state.t = Math.max(0, Math.min(end(), t)); draw(); };
  const back = () => go(state.stops().findLast((s) => s < state.t - near()) ?? 0);
  const next = () => { if (state.playing || still()) go(after() ?? end()); else if (after() !== undefined) run(after()); };
  const toggle = () => { if (state.playing) return go(state.t); if (state.t >= end() - near()) state.t = 0; run(state.wait() ? after() : end()); };
  button("start", "Back to the start", () => go(0));
  button("back", "One step back", back);
  const play = button("play", "Play", toggle);
  button("next", "One step forward", next);
  return { go, back, next, toggle, halt, end, paint: () => { if (play.now !== state.playing) icon(play, (play.now = state.playing) ? "pause" : "play", state.playing ? "Pause" : "Play"); } };
}

function scrubber(parent, control) { // the steps themselves, as wide as they are long
  const box = make("div", { class: "lk-scrub", role: "slider", tabindex: 0, "aria-label": "Step", "aria-valuemin": 0 }, parent);
  let ticks, stops;
  const seek = (e, snap) => {
    const { left, width } = box.getBoundingClientRect(), t = Math.max(0, Math.min(1, (e.clientX - left) / width)) * stops.at(-1);
    control.go(snap ? stops.reduce((a, b) => (Math.abs(b - t) < Math.abs(a - t) ? b : a)) : t);
  };
  box.addEventListener("pointerdown", (e) => { box.setPointerCapture(e.pointerId); seek(e); });
  box.addEventListener("pointermove", (e) => e.buttons && seek(e));
  box.addEventListener("pointerup", (e) => seek(e, true));
  return {
    build(list, phases) {
      stops = list;
      ticks = list.slice(1).map((s, k) => make("div", { class: "lk-tick p" + phases[k], style: `flex-grow:${(s - list[k]) / list.at(-1) + 1e-4}` }));
      box.replaceChildren(...ticks);
      box.classList.toggle("many", ticks.length > 24);
      box.setAttribute("aria-valuemax", ticks.length);
    },
    set(t, k, words) {
      ticks.forEach((d, i) => { d.classList.toggle("now", i === k - 1); d.style.setProperty("--done", Math.max(0, Math.min(1, (t - stops[i]) / (stops[i + 1] - stops[i] || 1)))); });
      box.setAttribute("aria-valuenow", k);
      box.setAttribute("aria-valuetext", words);
    },
  };
}

function pill(parent, text, words, act, mark) {
  const b = make("button", { type: "button", class: "lk-pill", title: words }, parent, text);
  if (mark !== undefined) b.dataset.right = mark;
  b.addEventListener("click", () => act(b));
  return b;
}

function shell(el, data, state, parts) { // what every player has; parts: build(W), draw(), and turn(by) for up and down keys
  const root = make("div", { class: "lockstep-player", role: "group", "aria-label": data.title, tabindex: 0 }, el), head = make("div", { class: "lk-head" }, root);
  make("b", {}, head, data.title);
  const ui = { root, source: make("span", {}, head), caption: make("p", { class: "lk-caption", "aria-live": "polite" }, root), alert: make("p", { class: "lk-alert", role: "alert", hidden: "" }, root) };
  ui.quiz = quiz(root, () => ui.control.next());
  ui.field = make("div", { class: "lk-field" }, root);
  const row = make("div", { class: "lk-bar" }, root), rebuild = () => { ui.width = ui.field.clientWidth; view.textContent = state.view === "ring" ? "matrix" : "ring"; parts.build(); parts.draw(); };
  const control = (ui.control = transport(row, state, () => parts.draw()));
  ui.scrub = scrubber(row, control);
  ui.more = make("div", { class: "lk-more" }, row);
  pill(ui.more, "1×", "Speed", (b) => { state.speed = state.speed === 4 ? 0.5 : state.speed * 2; b.textContent = state.speed + "×"; });
  const view = pill(ui.more, "", "Ring or matrix", () => { state.view = state.view === "ring" ? "matrix" : "ring"; rebuild(); });
  const watch = new ResizeObserver(() => { if (ui.field.clientWidth && ui.field.clientWidth !== ui.width) rebuild(); });
  watch.observe(ui.field);
  root.addEventListener("keydown", (e) => { // keys act here and never reach the notebook around it
    e.stopPropagation();
    if (e.target.closest("select, summary") || e.altKey || e.ctrlKey || e.metaKey) return;
    const acts = { ArrowRight: control.next, ArrowLeft: control.back, Home: () => control.go(0), End: () => control.go(control.end()), ArrowDown: () => parts.turn(1), ArrowUp: () => parts.turn(-1) };
    const act = e.key === " " && !e.target.closest("button") ? control.toggle : acts[e.key];
    if (act) { e.preventDefault(); act(); }
  });
  return Object.assign(ui, { rebuild, destroy() { control.halt(); watch.disconnect(); root.remove(); } });
}

// ---- the player of one run at a time
function mountPlay(el, data, opts) {
  const decoded = {}, at = [...data.runs[0].at], state = { t: 0, speed: 1, clock: data.clock, focus: 0, predict: data.predict, stops: () => run.stops, wait: () => state.predict, rate: () => (state.clock === "steps" ? 1.25 : pace) };
  const step = () => Math.max(0, run.stops.findIndex((s) => s >= state.t - 1e-9 * run.end)), which = () => data.runs.findIndex((r) => r.at.every((x, i) => x === at[i]));
  let run, stage, pace, said;
  const ui = shell(el, data, state, { build, draw, turn: (by) => { state.focus = (state.focus + by + run.n) % run.n; draw(); } }), { root, control } = ui;
  const clock = pill(ui.more, "", "Steps equally long, or as long as modelled", () => { const k = step(); state.clock = state.clock === "steps" ? "time" : "steps"; timing(); control.go(run.stops[k]); });
  data.axes.forEach((axis, i) => {
    const box = make("label", { class: "lk-pill" }, ui.more, axis.label + " "), select = make("select", { "aria-label": axis.label }, box);
    axis.values.forEach((v, j) => make("option", { value: j }, select, v));
    select.addEventListener("change", () => { at[i] = +select.value; choose(); });
  });
  const predict = pill(ui.more, "predict", "Choose before it moves", () => { state.predict = !state.predict; control.go(run.stops[step()]); });
  const foot = make("div", { class: "lk-foot" }, root), cells = range(5).map(() => { const d = make("div", {}, foot); return [make("strong", {}, d), make("span", {}, d)]; });
  const details = make("details", { class: "lk-bytes" }, root), list = (make("summary", {}, details, "Bytes per link"), make("ul", {}, details));
  details.addEventListener("toggle", () => draw());

  function choose() {
    const i = Math.max(0, which());
    run = decoded[i] ??= decode(data.runs[i]);
    state.clock = run.times ? data.clock : "steps";
    state.view = data.view === "auto" ? (run.n > 8 ? "matrix" : "ring") : data.view;
    state.focus = Math.min(state.focus, run.n - 1);
    clock.hidden = !run.times;
    ui.source.textContent = run.source;
    stage = null;
    timing();
    pace ??= endOf(run.items, run.S) / run.S / 0.8;
    control.halt(); state.t = 0;
    ui.rebuild();
  }
  function timing() { retime(run, state.clock); clock.textContent = state.clock; said = null; ui.scrub.build(run.stops, run.phases); }
  function build() {
    const W = ui.width || 320, ring = state.view === "ring";
    ui.field.replaceChildren();
    stage = (ring && ringStage(ui.field, run, W, data.title, false, (r) => { state.focus = r; draw(); })) || matrixStage(ui.field, run, W, data.title);
    said = null;
  }
  function draw() {
    if (!stage) return;
    const { t, playing } = state, k = step(), rests = Math.abs(t - run.stops[k]) < EPS;
    drawStage(stage, run, t, state.clock, state.focus);
    figures(run, t, k).forEach((pair, i) => pair.forEach((text, j) => (cells[i][j].textContent = text)));
    stage.count.step.textContent = k ? `${k} of ${run.S}` : `${run.S} steps`;
    stage.count.phase.textContent = (k ? run.names[run.phases[k - 1]] || "" : "start") + (state.clock === "time" ? " · " + seconds(t) : "");
    describe(k, rests && k === run.S);
    ui.scrub.set(t, k, `step ${k} of ${run.S}`);
    ui.quiz(run, k, `${which()},${rests ? k : "moving"},`, state.predict, rests && !playing);
    control.paint();
    predict.classList.toggle("on", state.predict);
    predict.setAttribute("aria-pressed", state.predict);
    if (details.open) list.replaceChildren(...linkTexts(run, t).map((text) => make("li", {}, null, text)));
    Object.assign(root.dataset, { step: k, steps: run.S, playing: !!playing, view: stage.matrix ? "matrix" : "ring", ranks: run.n, clock: state.clock });
    opts.onChange?.({ step: k, playing: !!playing });
  }
  function describe(k, done) {
    if (said === (said = `${which()},${k},${done}`)) return;
    ui.caption.setAttribute("aria-live", state.playing && !state.predict ? "off" : "polite");
    root.classList.toggle("wrong", done && !run.ok);
    if (!k) return ui.caption.replaceChildren(run.goal === "all_gather" ? "Start: each chunk is on one rank only." : run.start === "own" ? "Start: every rank holds only its own data." : "Start.");
    const [who, rest] = sentence(run, k - 1);
    ui.caption.replaceChildren(`Step ${k}: `, make("b", {}, null, who), rest, ...(done ? [make("span", { class: run.ok ? "lk-done" : "lk-wrong" }, null, " " + run.verdict)] : []));
  }
  choose();
  return { ...ui, state };
}

// ---- the race: several runs on one clock
function mountRace(el, data, opts) {
  const runs = data.runs.map((r) => retime(decode(r), "time")), total = Math.max(...runs.map((r) => r.end)), stops = [...new Set(runs.flatMap((r) => r.stops))].sort((a, b) => a - b);
  const state = { t: 0, speed: 1, view: data.view === "matrix" || runs[0].n > 8 ? "matrix" : "ring", stops: () => stops, rate: () => total / 9, wait: () => false };
  const ui = shell(el, data, state, { build, draw, turn() {} }), { root } = ui;
  ui.field.classList.add("race");
  const lanes = runs.map((run, i) => {
    const box = make("div", { class: "lk-lane" }, ui.field), name = data.axes[0].values[i];
    make("b", {}, box, name);
    return { run, name, holder: make("div", {}, box), line: make("div", { class: "lk-tick p2" }, make("div", { class: "lk-line" }, box)), text: make("p", {}, box), place: 1 + runs.filter((r) => r.end < run.end * (1 - 1e-9)).length };
  });
  ui.scrub.build([0, total], [2]);
  function build() {
    for (const { run, name, holder, ...lane } of lanes) holder.replaceChildren();
    for (const lane of lanes) {
      const W = lane.holder.clientWidth || 200;
      lane.stage = (state.view === "ring" && ringStage(lane.holder, lane.run, W, lane.name, true)) || matrixStage(lane.holder, lane.run, W, lane.name, true);
    }
  }
  function draw() {
    if (!lanes) return;
    const done = lanes.filter((l) => state.t >= l.run.end - EPS).sort((a, b) => a.place - b.place);
    lanes.forEach(drawLane);
    const text = !state.t ? "All start together on equal links. Which is done first?" : done.length ? `${capital(and(done.map((l) => `${l.name} after ${seconds(l.run.end)}`)))}.` : "None is done yet.";
    if (ui.caption.textContent !== text) ui.caption.textContent = text;
    ui.source.textContent = `${runs[0].source} · ${seconds(state.t)}`;
    ui.control.paint();
    ui.scrub.set(state.t, 0, seconds(state.t));
    ui.quiz(runs[0], 0, "", false, false);
    Object.assign(root.dataset, { step: stops.filter((s) => s <= state.t).length - 1, playing: !!state.playing, view: state.view });
    opts.onChange?.({ step: +root.dataset.step, playing: !!state.playing });
  }
  function drawLane({ run, stage, line, text, place }) {
    const t = Math.min(state.t, run.end), over = state.t >= run.end - EPS, [link, most] = busiest(traffic(run, Infinity));
    if (stage) drawStage(stage, run, t, "time", -1);
    line.style.setProperty("--done", t / total);
    line.classList.toggle("over", over);
    text.textContent = `${over ? `#${place}, ${seconds(run.end)}` : "under way"} · busiest link, ${link}: ${inN(most)}`;
  }
  ui.rebuild();
  return { ...ui, state };
}

// ---- mounting: on a page, and in a notebook
function mount(el, data, opts = {}) {
  const player = (data.kind === "race" ? mountRace : mountPlay)(el, data, opts), { state, control, alert } = player, finish = () => control.go(control.end());
  addEventListener("beforeprint", finish);
  return { root: player.root,
    step: (k) => { const s = state.stops(); control.go(s[Math.max(0, Math.min(k, s.length - 1))]); },
    playing: (on) => { if (on !== !!state.playing) control.toggle(); },
    error: (text) => { alert.textContent = text; alert.hidden = !text; },
    destroy: () => { removeEventListener("beforeprint", finish); player.destroy(); } };
}

function render({ model, el }) { // anywidget: payload, step, playing and error are traits of the Python widget
  let player;
  const push = (s) => { if (!player) return; for (const k in s) if (model.get(k) !== s[k]) model.set(k, s[k]); model.save_changes(); };
  const draw = () => { player?.destroy(); player = null; player = mount(el, JSON.parse(model.get("payload")), { onChange: push }); player.error(model.get("error")); };
  const heard = { "change:payload": draw, "change:error": () => player.error(model.get("error")), "change:playing": () => player.playing(model.get("playing")),
    "change:step": () => { if (model.get("step") !== +player.root.dataset.step) player.step(model.get("step")); } };
  draw();
  if (model.get("step")) player.step(model.get("step"));
  for (const k in heard) model.on(k, heard[k]);
  return () => { for (const k in heard) model.off(k, heard[k]); player.destroy(); };
}

function scan(root = document) {
  for (const el of root.querySelectorAll("[data-lockstep-player]:not([data-mounted])")) {
    el.dataset.mounted = "";
    el.replaceChildren();
    mount(el, JSON.parse(el.dataset.lockstepPlayer));
  }
}
globalThis.lockstepPlayer = { mount, scan, render };
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => scan());
else scan();
})();
