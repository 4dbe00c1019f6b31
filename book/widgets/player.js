/* Lockstep's chunk player: draws what a trace says, and nothing else. chunks_data.py writes the data. */
(() => {
const { EPS, range, clamp, make, canvas, color, and, seconds, bytes, pill, choices, footer, shell, define } = globalThis.lockstepControls;
const { min, max, abs, floor, hypot } = Math;

// # data: messages, contents
function reader(n) { // equal texts give the same array: drawing compares by identity
  const seen = {}, bits = s => range(n, r => (parseInt(s[r >> 2] || "0", 16) >> (r & 3)) & 1);
  const read = s => (s === "?" ? null : s[0] === "(" ? s.slice(1, -1).split(",").map(Number) : bits(s));
  return s => (s in seen ? seen[s] : (seen[s] = read(s)));
}

function parse(m, held, read, k) {
  const num = s => (s[0] === "-" ? -1 : parseInt(s, 36)), [src, dst, chunk] = m.slice(1, 4).map(num);
  const sent = m[6] ? read(m[6]) : chunk < 0 ? null : held[src][chunk];
  return { src, dst, chunk, op: m[4], sent, k, end: +(m[8] ?? k) + 1, after: m[5] ? read(m[5]) : sent,
    into: m[4] === "!" ? -1 : m[7] ? num(m[7]) : chunk };
}

function decode(data) {
  const { c, width, times } = data, read = reader(data.n), items = [];
  const spread = line => { const all = line.split("/").map(s => s !== "-" && read(s)); return range(c, i => all[i % all.length]); };
  const held = data.start.map(spread), { goals = [`(${range(data.n, () => 1)})`] } = data;
  const word = RegExp("^(.{W})(.{W})(.{W})([+=?!])([^~@^]*)(?:~([^@^]*))?(?:@([^^]*))?(?:\\^(\\d+))?$".replaceAll("W", width));
  const run = { ...data, S: data.steps.length, items, goals: range(data.n, r => spread(goals[r % goals.length])), updates: held.map(row => row.map(v => [{ k: 0, s: 0, v }])) };
  const put = (r, c, v, k, s) => { held[r][c] = v; run.updates[r][c].push({ k, s, v }); };
  const settle = k => { // what changed before step k
    for (const i of items) if (i.end === k && i.into >= 0) put(i.dst, i.into, i.after, k, i.s1);
    for (const [at, r, c, s] of data.holds) if (at === k) put(r, c, read(s), k, endOf(run, k));
  };
  data.steps.forEach((line, k) => {
    settle(k);
    line.split(" ").filter(Boolean).forEach((text, j) => {
      const i = parse(word.exec(text), held, read, k), t = times?.[k], at = t?.length > 2 ? 2 * j : 0;
      [i.s0, i.s1] = t ? [t[at], t[at + 1]].map(x => x / 1e4 * data.duration_s) : [k, k + 1];
      items.push(i);
    });
  });
  settle(run.S);
  return gather(run);
}
const endOf = (run, k) => max(0, ...run.items.filter(i => i.k < k).map(i => i.s1));

function gather(run) { // items of one step, sender and receiver travel as one message
  const byKey = {};
  for (const i of run.items) {
    const pair = `${i.src},${i.dst}`, m = (byKey[[i.k, pair]] ??= { ...i, pair, items: [], share: 0 });
    m.items.push(i);
    m.s0 = min(m.s0, i.s0); m.s1 = max(m.s1, i.s1);
    m.share += run.shares?.[i.chunk] ?? 1 / run.c;
  }
  run.messages = Object.values(byKey);
  run.links = [...new Set(run.messages.map(m => m.pair))];
  run.both = new Set(run.messages.filter(m => byKey[[m.k, m.dst, m.src]]).map(m => m.pair));
  run.most = max(1, ...run.messages.map(m => m.items.length));
  return run;
}

function retime(run, clock) { // "steps": all equally long; "time": as long as modelled
  const timed = clock === "time";
  for (const m of run.messages) [m.a, m.b] = timed ? [m.s0, m.s1] : [m.k, m.end];
  for (const list of run.updates.flat()) { for (const u of list) u.at = timed ? u.s : u.k; list.sort((a, b) => a.at - b.at); }
  run.stops = range(run.S + 1, k => (timed ? endOf(run, k) : k));
  run.end = run.stops[run.S];
  return run;
}

const latest = (run, r, c, t) => run.updates[r][c].findLast(u => u.at <= t + EPS);
const complete = ({ goals, n }, r, c, v) => // what was promised there, or the mean of it
  !!v && !!goals[r][c] && [1, n].some(k => v.every((x, i) => abs(x * k - goals[r][c][i]) < 1e-3));
function tally(run, t) {
  const all = run.goals.flatMap((row, r) => row.flatMap((goal, c) => (goal ? complete(run, r, c, latest(run, r, c, t).v) : [])));
  return [all.filter(Boolean).length, all.length];
}

function traffic(run, t) { // what has left by now, in buffers
  const pairs = {}, out = Array(run.n).fill(0), into = [...out];
  for (const m of run.messages) if (m.a < t - EPS) { pairs[m.pair] = (pairs[m.pair] || 0) + m.share; out[m.src] += m.share; into[m.dst] += m.share; }
  return { pairs, out, into };
}
function busiest({ out, into }) {
  const most = max(...out, ...into), at = list => list.findIndex(x => x > most - 1e-9);
  return [at(out) < 0 ? "into rank " + at(into) : "out of rank " + at(out), most];
}

// # chunk bars
const rect = (box, rest) => "<rect " + ["x", "y", "width", "height"].map((name, i) => `${name}="${box[i].toFixed(2)}" `).join("") + rest + "/>";

function segments(v, w, h) { // hollow where missing, hatched where double
  if (!v) return rect([1, h / 2 - 1, w - 2, 1.5], 'class="lk-unk"');
  const p = h >= 8 ? 2 : 0, sw = (w - 2 * p) / v.length, gap = sw >= 5 ? 1 : sw >= 3 ? 0.6 : 0;
  return v.map((x, k) => {
    const tall = x > 1 ? h + 3 : max(0.3, x) * (h - 2 * p), box = [p + k * sw + gap / 2, x > 1 ? -1.5 : h - p - tall, sw - gap, tall];
    return x > 0 ? rect(box, `rx="${p / 2}" fill="${color(k)}"`) + (x > 1 ? `<path d="M${box[0] + box[2] / 2} ${box[1]}v${tall}" stroke-width="${box[2]}" class="lk-hatch"/>` : "") : "";
  }).join("");
}

function label(v, short) {
  if (!v) return "?";
  const some = v.filter(x => x > 0), most = max(...v);
  if (most > 1) return "×" + +most.toFixed(2);
  return most > 0 && most < 1 ? (short ? "~" : "mean") : short ? some.length : `${some.length}/${v.length}`;
}

function bar(parent, [x, y, w, h], note) { // note: where its number stands
  const g = make("g", parent, { transform: `translate(${x},${y})` });
  const track = make("rect", g, { width: w, height: h, rx: min(4, h / 3), "stroke-width": h < 6 ? 1 : 1.5 }), inner = make("g", g), text = note && make("text", g, { x: note.x, y: note.y, "text-anchor": note.anchor || "start" });
  let last, mark;
  return (v, done, now = "") => {
    if (now !== mark) track.setAttribute("class", "lk-track " + (mark = now));
    if (v === last) return;
    inner.innerHTML = segments((last = v), w, h);
    if (!text) return;
    text.textContent = label(v, note.short);
    text.setAttribute("class", "lk-num" + (!v || max(...v) > 1 ? " bad" : done ? " done" : ""));
  };
}

// # layout
function sizes({ n, c, most }, W, style) {
  const wide = W >= 560, full = style === "full", mini = style === "mini", few = n <= 8;
  const barW = full ? (wide ? 76 : 50) : n * (mini ? 36 / max(n, 6) : few ? (wide ? 6 : 4) : wide ? 3 : 2);
  const rowH = full ? (c > 6 ? 14 : 19) : mini ? 36 / max(c, 6) : c <= 8 ? 6.5 : wide ? 4 : 3;
  const ih = most === 1 ? (full ? 11 : 5) : max(1.5, min(full ? 8 : 4, (full ? 40 : 26) / most - 1)), mw = max(14, barW * 0.7);
  return { full, mini, barW, rowH, barH: rowH - (full ? 6 : 1), head: full ? 29 : 17, pad: full ? (wide ? 17 : 14) : 4, cw: full ? barW + (wide ? 60 : 53) : max(24, barW + 8),
    ch: (full ? 33 : 20) + c * rowH, mw, ih, bw: mw + 8, bh: most * (ih + 1) + 6, travel: full ? 34 : mini ? 8 : 14, gap: mini ? 2 : 7 };
}

function racetrack(n, W, cw, need) { // n places clockwise from the top middle: [x, row]
  let s = n === 3 ? 0 : 1, a, b, inset;
  for (; ; s++) {
    a = floor((n - 2 * s) / 2); b = n - 2 * s - a;
    inset = [0.14, 0.14, 0.16, 0.03][b] || 0;
    if (b <= 1 || (W - cw) * (1 - 2 * inset) / (b - 1) >= need) break;
  }
  const x = u => cw / 2 + (W - cw) * u, row = (k, y) => range(k, i => [x(k === 1 ? 0.5 : inset + (1 - 2 * inset) * i / (k - 1)), y]), top = a ? 1 : 0;
  const side = u => range(s, j => [x(u), top + j]), first = n === 2 ? 1 : max(0, a - 1) >> 1;
  const places = [...row(a, 0), ...side(1), ...row(b, top + s).reverse(), ...side(0).reverse()];
  return [...places.slice(first), ...places.slice(0, first)];
}

function track({ xy, size, mid, kind }, pair, { n, both }, bw, bh) { // where a bar touches neither card
  const [a, b] = pair.split(","), [A, B] = [xy[a], xy[b]], d = [B[0] - A[0], B[1] - A[1]], len = hypot(...d) || 1;
  const chord = kind === "mesh" && ![1, n - 1].includes((b - a + n) % n) ? 0.35 : 0; // curves in towards the middle
  const lane = both.has(pair) ? (abs(d[1]) > abs(d[0]) ? size.bw : size.bh) + 6 : 0; // two ways: two lanes
  const C = [0, 1].map(i => (A[i] + B[i]) / 2 * (1 - chord) + mid[i] * chord + (i ? d[0] : -d[1]) / len * lane);
  const at = u => [0, 1].map(i => (1 - u) ** 2 * A[i] + 2 * u * (1 - u) * C[i] + u * u * B[i]);
  const hits = (p, P) => abs(p[0] - P[0]) < (size.cw + bw) / 2 + 4 && abs(p[1] - P[1]) < (size.ch + bh) / 2 + 4;
  let u0 = 0, u1 = 1;
  while (u0 < 1 && hits(at(u0), A)) u0 += 0.01;
  while (u1 > 0 && hits(at(u1), B)) u1 -= 0.01;
  return { room: u1 > u0 ? hypot(at(u1)[0] - at(u0)[0], at(u1)[1] - at(u0)[1]) : 0, at: f => at(u0 + (u1 - u0) * f) };
}

function fits(run, plan) {
  const { xy, size } = plan, far = (A, B) => abs(A[0] - B[0]) >= size.cw + size.gap || abs(A[1] - B[1]) >= size.ch + size.gap;
  if (!xy.every((A, a) => xy.slice(0, a).every(B => far(A, B)))) return false;
  plan.ways = Object.fromEntries(run.links.map(p => [p, track(plan, p, run, size.bw, size.bh)]));
  return Object.values(plan.ways).every(way => way.room >= size.travel);
}

function arrange(run, W, style, shape = run.shape, inner = 0) { // lowest plan with room for all, or null
  const size = sizes(run, W, style), { cw, ch, bw, bh } = size, { kind } = shape, tree = kind === "tree", hub = tree ? -1 : shape.hub, ranks = range(run.n).filter(r => r !== hub);
  const use = kind === "ring" && run.n <= 4 ? min(W, cw * 4.4) : W;
  const places = tree ? ranks.map(r => [cw / 2 + (W - cw) * shape.slot[r], shape.depth[r]]) : racetrack(ranks.length, use, cw, cw + bw + size.travel + 12).map(([x, row]) => [x + (W - use) / 2, row]);
  const rows = max(...places.map(p => p[1]));
  for (let v = ch * (ranks.length <= 6 && !tree ? 0.62 : 1) + 8; v <= ch + bh + 150; v += 6) {
    const H = rows * v + ch + 4, plan = { kind, size, W, H, mid: [W / 2, H / 2], xy: [] };
    ranks.forEach((r, i) => (plan.xy[r] = [places[i][0], ch / 2 + 2 + places[i][1] * v]));
    if (hub >= 0) plan.xy[hub] = plan.mid;
    if ((!inner || H - 2 * ch - 2 * bh >= inner) && fits(run, plan)) return plan;
  }
  return null;
}
const anyhow = (run, W, style) => arrange(run, W, style) || arrange(run, W, style, { kind: "mesh", hub: run.shape.hub });

function planFor(run, W) { // full cards if they fit, else columns of bars
  const full = run.n <= 8 && arrange(run, W, "full"), ring = run.shape.kind === "ring", barW = max(72, run.n * 6);
  if (full && full.H <= max(610, W * 0.8)) return { ...full, where: ring && run.n > 2 ? "centred" : "" };
  const box = { barW, full: true, rowH: 13, barH: 9, head: 28, pad: 16, cw: barW + 62, ch: 34 + run.c * 13 };
  const centred = ring && arrange(run, W, "compact", run.shape, box.ch + 76);
  if (centred && W - 2 * centred.size.cw - centred.size.bw >= box.cw) return { ...centred, box, where: "centred" };
  const w = W >= 600 ? W - box.cw - 20 : W, plan = anyhow(run, w, "compact");
  return plan && { ...plan, box, where: w < W ? "over" : "" };
}

// # stages
function card(ui, r, [x, y], { c }, size) {
  const { full, pad, barW, barH } = size, g = make("g.lk-card", ui.rest, { transform: `translate(${x},${y})`, "data-rank": r });
  make("rect.lk-box", g, { width: size.cw, height: size.ch, rx: full ? 10 : 5 });
  if (full) make("circle", g, { cx: pad + 5, cy: 15, r: 5, fill: color(r) });
  else make("rect", g, { x: pad, y: 12, width: barW, height: 2, fill: color(r) });
  make(full ? "text.lk-rank" : "text.lk-tiny", g, { x: pad + (full ? 15 : 0), y: full ? 19.5 : 9.5 }, full ? `rank ${r}` : r);
  return range(c, k => {
    const y = size.head + k * size.rowH;
    if (full) make("text.lk-tiny", g, { x: pad - 4, y: y + barH / 2 + 4, "text-anchor": "end" }, k);
    return bar(g, [pad, y, barW, barH], full && { x: barW + 5, y: barH / 2 + 4 });
  });
}

function counter(parent, where) {
  const words = make("div", make("div", parent, { class: "lk-mid " + where }));
  return [make("b", words), make("span", words), make("span", words)];
}

function ringStage(parent, run, W, name, pick) { // no pick: small, for a race
  const mini = !pick, plan = mini ? anyhow(run, W, "mini") : planFor(run, W);
  if (!plan) return null;
  const { size } = plan, count = mini ? null : counter(parent, plan.where), ui = canvas(parent, plan.W, plan.H, { "aria-label": name }), lines = {};
  for (const pair of run.links) {
    const way = track(plan, pair, run, 0, 0), points = range(17, i => way.at(i / 16).map(v => v.toFixed(1)).join(" "));
    lines[pair] = make("path.lk-link", ui.rest, { d: "M" + points.join("L") });
  }
  const cells = plan.xy.map(([x, y], r) => card(ui, r, [x - size.cw / 2, y - size.ch / 2], run, size));
  const draw = (g, m) => {
    const h = m.items.length * (size.ih + 1) + 5;
    make("rect", g, { x: -size.bw / 2, y: -h / 2, width: size.bw, height: h, rx: min(6, h / 3) });
    m.items.forEach((i, j) => bar(g, [-size.mw / 2, -h / 2 + 3 + j * (size.ih + 1), size.mw, size.ih])(i.sent));
  };
  return { cells, lines, count, thin: size.rowH < 9, move: movers(ui.move, draw, (m, f) => plan.ways[m.pair].at(f)), large: plan.box && large(count[0].parentNode.parentNode, ui.rest, run, plan.box, pick) };
}

function large(parent, rest, run, box, pick) { // one rank with its numbers
  let shown, cells;
  rest.onpointerover = e => { const g = e.target.closest(".lk-card"); if (g) pick(+g.dataset.rank); };
  return r => {
    if (r === shown) return cells;
    parent.querySelector(".lk-stage")?.remove();
    for (const g of rest.querySelectorAll(".lk-card")) g.classList.toggle("on", +g.dataset.rank === r);
    return (cells = card(canvas(parent, box.cw + 2, box.ch + 2, { "aria-label": `rank ${r}` }), (shown = r), [1, 1], run, box));
  };
}

function movers(parent, draw, place) { // bars under way
  const shown = new Map();
  return flying => {
    for (const [m, g] of shown) if (!flying.has(m)) { g.remove(); shown.delete(m); }
    for (const [m, f] of flying) {
      if (!shown.has(m)) { const g = make("g.lk-mover", parent); draw(g, m); shown.set(m, g); }
      shown.get(m).setAttribute("transform", `translate(${place(m, f).map(v => v.toFixed(2))})`);
    }
  };
}

function matrixStage(parent, run, W, name, pick) { // a row per rank, a column per chunk
  const mini = !pick, left = mini ? 12 : 42, top = mini ? 4 : 20, cw = (W - left) / run.c, beside = !mini && cw >= 78, text = !mini && cw >= 17;
  const barH = mini ? max(3, min(9, 110 / run.n - 2)) : run.n <= 8 ? 13 : 8, rowH = barH + (mini ? 2 : beside || !text ? 9 : 17), barW = max(2, cw - (beside ? 40 : min(8, cw * 0.16)));
  const count = mini ? null : counter(parent, ""), ui = canvas(parent, W, top + run.n * rowH + 4, { "aria-label": name }), x = c => left + max(0, c) * cw, y = r => top + r * rowH;
  const note = text && (beside ? { x: barW + 5, y: barH - 2 } : { x: barW / 2, y: barH + 11, short: true, anchor: "middle" });
  if (text) range(run.c, c => make("text.lk-tiny", ui.rest, { x: x(c) + barW / 2, y: top - 8, "text-anchor": "middle" }, beside ? `chunk ${c}` : c));
  const cells = range(run.n, r => {
    make("circle", ui.rest, { cx: 5, cy: y(r) + barH / 2, r: mini ? 3 : 4, fill: color(r) });
    if (!mini && rowH >= 12) make("text.lk-tiny", ui.rest, { x: 14, y: y(r) + barH / 2 + 4 }, r);
    return range(run.c, c => bar(ui.rest, [x(c), y(r), barW, barH], note));
  });
  const draw = (g, m) => { for (const i of m.items) { make("rect", g, { x: x(i.chunk) - 2, y: -2, width: barW + 4, height: barH + 4, rx: 4 }); bar(g, [x(i.chunk), 0, barW, barH])(i.sent); } };
  return { cells, count, matrix: true, move: movers(ui.move, draw, (m, f) => [0, y(m.src + (m.dst - m.src) * f)]) };
}

const stageOf = (view, ...how) => (view === "ring" && ringStage(...how)) || matrixStage(...how);
const ease = f => { const u = min(1, f / 0.85); return u * u * (3 - 2 * u); };

function drawStage(stage, run, t, clock, focus) {
  const flying = new Map(), out = new Set(), used = new Set(), steps = clock === "steps", rest = steps && t % 1 === 0 && t > 0;
  for (const m of run.messages) {
    const f = (t - m.a) / (m.b - m.a), under = f > 1e-9 && f < 1 - 1e-9;
    if (under || rest && m.b === t) used.add(m.pair);
    if (!under) continue;
    flying.set(m, steps ? ease(f) : f);
    if (m.items.length < run.c || !stage.thin) for (const i of m.items) out.add(i.src * run.c + i.chunk);
  }
  stage.move(flying);
  const big = stage.large?.(focus);
  stage.cells.forEach((row, r) => row.forEach((cell, c) => {
    const u = latest(run, r, c, t), now = [u.v, complete(run, r, c, u.v), out.has(r * run.c + c) ? "out" : rest && u.k === t ? "in" : ""];
    cell(...now);
    if (r === focus) big?.[c](...now);
  }));
  const now = traffic(run, t).pairs, most = max(...Object.values(traffic(run, Infinity).pairs));
  for (const pair in stage.lines) { // as thick as the bytes it carried
    stage.lines[pair].classList.toggle("on", used.has(pair));
    stage.lines[pair].style.strokeWidth = 1.5 + 3.5 * (now[pair] || 0) / most;
  }
}

// # words and figures
const inN = x => x.toFixed(2) + " n";
const whose = v => (v ? and(v.map((x, r) => x > 0 && r + (x === 1 ? "" : ` ×${+x.toFixed(2)}`)).filter(Boolean)) || "nobody" : "unknown");

function chunksOf(items) {
  const list = items.map(i => i.chunk).sort((a, b) => a - b), n = list.length, [a, z] = [list[0], list.at(-1)];
  return a < 0 ? "something unwatched" : n === 1 ? "chunk " + a : "chunks " + (n > 2 && z - a === n - 1 ? `${a}–${z}` : and(list));
}

function figures(run, t, k) { // the row of numbers: [value, meaning]
  const now = traffic(run, t), [link, most] = busiest(now), who = max(0, run.who), say = run.unseen ? () => "?" : inN;
  return [[`${k} / ${run.S}`, "rounds"], [say(now.out[who]), run.who < 0 ? "sent per rank, so far" : `sent by rank ${who}, so far`], [t < run.end ? "?" : say(run.total), "at the end" + (t < run.end ? "" : run.formula)],
    [tally(run, t).join(" / "), "chunks complete"], [say(most), "busiest link" + (t && !run.unseen ? ", " + link : "")]];
}
function linkTexts({ n, bytes: all }, { out, into }) {
  const size = x => (all ? bytes(x * all) : inN(x));
  return range(n, r => `rank ${r}: ${size(out[r])} out, ${size(into[r])} in`);
}

// # prediction
function question(run, k) { // by turns: which chunk goes, and what a chunk will hold
  const all = run.messages.filter(m => m.k === k && m.into >= 0), i = all[k * 3 % all.length]?.items[0];
  if (!i) return null;
  const { src, dst, chunk, sent, into, after } = i, before = latest(run, dst, into, run.stops[k]).v, got = run.items.find(j => j.end === k && j.dst === src && j.into === chunk);
  if (k % 2 === 0 && run.most === 1 && run.c > 1) return { text: `Which chunk does rank ${src} send to rank ${dst} next?`,
    options: range(min(5, run.c), d => (chunk + d) % run.c).sort((a, b) => a - b).map(c => ["chunk " + c, c === chunk]),
    why: `rank ${src} ${got ? `passes on chunk ${chunk}, which it got from rank ${got.src} a step ago` : `sends chunk ${chunk}, with data of rank ${whose(sent)}`}.` };
  const texts = [...new Set([after, before?.map((x, r) => x + sent?.[r]), sent, before, range(run.n, () => 1)].map(whose))].slice(0, 4);
  return { text: `Whose data will rank ${dst}'s chunk ${into} hold after this step?`, options: texts.sort().map(text => [text, text === whose(after)]),
    why: i.op === "=" ? `what arrives (${whose(sent)}) takes the place of what was there.` : `what was there (${whose(before)}) and what arrives (${whose(sent)}) make ${whose(after)}.` };
}

function quiz(field, go) {
  const box = make("div.lk-quiz", null, { hidden: "" }), ask = make("p", box), options = make("div.lk-options", box), said = make("p", box, { role: "status" });
  let at, right = 0, asked = 0, keep = false;
  field.before(box);
  const answer = (why, ok, k) => {
    asked++; right += ok; keep = true;
    said.className = ok ? "" : "no";
    said.textContent = `Step ${k + 1}: ${ok ? "right" : "no"}, ${why} ${right} of ${asked} right.`;
    go();
  };
  return (run, k, key, on) => { // empty key: under way, no question
    box.hidden = !on;
    if (key === at) return;
    at = key;
    const q = key && k < run.S && question(run, k);
    ask.textContent = q ? q.text : k < run.S ? "…" : "That was the last step.";
    options.replaceChildren(...(q?.options || []).map(([text, ok]) => { const b = pill(null, text, "", () => answer(q.why, ok, k)); b.dataset.right = ok; return b; }));
    if (q && keep) { keep = false; options.firstChild.focus({ preventScroll: true }); }
  };
}

// # player
function mountPlay(el, data, opts) {
  const decoded = {}, state = { t: 0, speed: 1, playing: false, focus: 0, predict: data.predict, stops: () => run.stops, wait: () => state.predict, rate: () => (state.clock === "steps" ? 1.25 : pace) };
  let run, stage, pace, said;
  const step = () => max(0, run.stops.findIndex(s => s >= state.t - 1e-9 * run.end));
  const ui = shell(el, data, state, { build, draw, turn: by => pick((state.focus + by + run.n) % run.n) }), { root, control, more } = ui;
  const view = viewPill(ui, state), ask = quiz(ui.field, control.next);
  const pick = r => { state.focus = r; draw(); };
  const clock = pill(more, "", "Clock", () => { const k = step(); timing(state.clock === "steps" ? "time" : "steps"); control.go(run.stops[k]); });
  const which = choices(more, data, choose);
  const predict = pill(more, "predict", "Choose before it moves", () => { state.predict = !state.predict; control.go(run.stops[step()]); });
  const foot = footer(root, 5);
  const details = make("details.lk-bytes lk-small", root), list = (make("summary", details, {}, "Bytes per link"), make("ul", details));
  details.ontoggle = () => draw();

  function choose() {
    run = decoded[which()] ??= decode(data.runs[which()]);
    state.view = data.view === "auto" ? (run.n > 8 ? "matrix" : "ring") : data.view;
    state.focus = min(state.focus, run.n - 1);
    clock.hidden = !run.times;
    details.hidden = !!run.unseen;
    ui.source.textContent = run.source;
    timing(run.times ? data.clock : "steps");
    pace ??= endOf(run, run.S) / run.S * 1.25;
    control.halt();
    state.t = 0;
    ui.rebuild();
  }
  function timing(to) { clock.textContent = state.clock = to; retime(run, to); ui.scrub.build(run.stops, run.phases); said = null; }
  function build() {
    view();
    ui.field.replaceChildren();
    stage = stageOf(state.view, ui.field, run, ui.width || 320, data.title, pick);
    said = null;
  }
  function draw() {
    if (!stage) return;
    const { t, playing } = state, k = step(), rests = abs(t - run.stops[k]) < EPS;
    drawStage(stage, run, t, state.clock, state.focus);
    foot(figures(run, t, k));
    const texts = [k ? `${k} of ${run.S}` : run.S + (run.S > 1 ? " steps" : " step"), k ? run.names[run.phases[k - 1]] : "start", state.clock === "time" ? seconds(t) : ""];
    stage.count.forEach((e, i) => (e.textContent = texts[i]));
    describe(k, rests && k === run.S);
    ui.scrub.set(t, k, `step ${k} of ${run.S}`);
    ask(run, k, rests && !playing && state.predict ? `${which()},${k}` : "", state.predict);
    control.paint();
    predict.classList.toggle("on", state.predict);
    predict.setAttribute("aria-pressed", state.predict);
    if (details.open) list.replaceChildren(...linkTexts(run, traffic(run, t)).map(text => make("li", null, {}, text)));
    Object.assign(root.dataset, { step: k, steps: run.S, playing, view: stage.matrix ? "matrix" : "ring", ranks: run.n, clock: state.clock });
    opts.onChange?.({ step: k, playing });
  }
  function describe(k, done) {
    if (said === (said = `${which()},${k},${done}`)) return;
    ui.caption.setAttribute("aria-live", state.playing && !state.predict ? "off" : "polite");
    const m = run.messages.find(m => m.k === k - 1), who = m && `rank ${m.src} sends ${chunksOf(m.items)} to rank ${m.dst}`;
    ui.caption.replaceChildren(...(k ? [`Step ${k}: `, make("b", null, {}, who), run.rests[run.says[k - 1]]] : [run.begin]));
    if (done) make(run.ok ? "span.lk-done" : "span.lk-wrong", ui.caption, {}, " " + run.verdict);
  }
  choose();
  return { ...ui, state };
}

function viewPill(ui, state) { // the button to the other view; returns what names it anew
  const b = pill(ui.more, "", "View", () => { state.view = b.textContent; ui.rebuild(); });
  return () => { b.textContent = state.view === "ring" ? "matrix" : "ring"; };
}

// # race
function mountRace(el, data, opts) {
  const runs = data.runs.map(r => retime(decode(r), "time")), total = max(...runs.map(r => r.end)), stops = [...new Set(runs.flatMap(r => r.stops))].sort((a, b) => a - b);
  const state = { t: 0, speed: 1, playing: false, view: data.view === "matrix" || runs[0].n > 6 ? "matrix" : "ring", stops: () => stops, rate: () => total / 9, wait: () => false };
  const ui = shell(el, data, state, { build, draw, turn() {} }), { root } = ui, view = viewPill(ui, state);
  const lanes = runs.map((run, i) => {
    const box = make("div.lk-lane lk-small", ui.field), name = (make("b", box, {}, data.axes[0].values[i]).textContent);
    return { run, name, holder: make("div", box), line: make("div.lk-tick", make("div.lk-line", box)), text: make("p", box) };
  });
  ui.field.classList.add("race");
  ui.scrub.build([0, total], "2");
  function build() {
    view();
    for (const lane of lanes) lane.holder.replaceChildren();
    for (const lane of lanes) lane.stage = stageOf(state.view, lane.holder, lane.run, lane.holder.clientWidth || 200, lane.name);
  }
  function draw() {
    const { t, playing } = state, done = lanes.filter(l => t >= l.run.end - EPS).sort((a, b) => a.run.end - b.run.end), step = stops.filter(s => s <= t).length - 1;
    lanes.forEach(drawLane);
    const text = done.length ? `Done: ${and(done.map(l => `${l.name} after ${seconds(l.run.end)}`))}.` : "All start together on equal links. Which is done first?";
    if (ui.caption.textContent !== text) ui.caption.textContent = text;
    ui.source.textContent = `${runs[0].source} · ${seconds(t)}`;
    ui.control.paint();
    ui.scrub.set(t, 0, seconds(t));
    Object.assign(root.dataset, { step, playing, view: state.view });
    opts.onChange?.({ step, playing });
  }
  function drawLane({ run, stage, line, text }) {
    const t = min(state.t, run.end), over = t > run.end - EPS, [link, most] = busiest(traffic(run, Infinity));
    drawStage(stage, run, t, "time", -1);
    line.style.setProperty("--done", t / total);
    line.classList.toggle("won", over);
    text.textContent = `${over ? "done after " + seconds(run.end) : "under way"} · busiest link, ${link}: ${inN(most)}`;
  }
  ui.rebuild();
  return { ...ui, state };
}

define("player", data => (data.kind === "race" ? mountRace : mountPlay));
})();
