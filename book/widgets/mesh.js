/* Lockstep's mesh explorer: ranks on their nodes, their groups along each axis, and what a recorded step sends where.
   mesh.py says what the data mean. Ranks have the numbers of the trace; a view numbers and seats them anew. It is no
   scene of fixed marks: the reader reorders the axes and resizes the nodes, and all places follow from that. */
import {
  EPS, range, clamp, sum, make, canvas, color, and, num, bytes, ease, pill, choice, footer, shell, write,
  reserve, plain, define,
} from "./scene.js";

const { min, max, ceil, floor } = Math;
const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const product = list => list.reduce((a, b) => a * b, 1);
/** The largest divisor that has room. */
const most = (n, room) => range(n, i => n - i).find(m => n % m === 0 && m <= room);

// # data
function permutations(list) {
  if (list.length < 2) return [list];
  return list.flatMap((x, i) => permutations(list.toSpliced(i, 1)).map(rest => [x, ...rest]));
}

function decode(raw) {
  const { axes, shape } = raw;
  const [n, A] = [product(shape), axes.length];
  const at = range(n, r => shape.map((size, a) => floor(r / product(shape.slice(a + 1))) % size));
  const group = (r, a) => range(n).filter(q => at[q].every((x, b) => b === a || x === at[r][b]));
  return { ...raw, n, A, at, group, S: raw.stops.length - 1, home: range(A), orders: permutations(range(A)) };
}

/** Where each rank is, for this order of the axes and number of ranks on a node. */
function seated(run, order, per) {
  const number = run.at.map(at => order.reduce((before, a) => before * run.shape[a] + at[a], 0));
  const node = number.map(x => floor(x / per));
  const who = [];
  number.forEach((x, r) => (who[x] = r));
  const crosses = ({ src, dst }) => node[src] !== node[dst];
  return { order, per, number, node, who, nodes: ceil(run.n / per), crosses };
}

const across = (flows, view) => sum(flows.filter(view.crosses), flow => flow.bytes);
const named = (run, order) => order.map(a => run.axes[a]).join("\u00a0·\u00a0");
const style = (run, name) => "x" + (name < run.A ? run.A - 1 - name : 4);

// # stage: nodes as frames, in each the ranks in the order of their numbers, along the innermost axis first
function plan(run, view, W) {
  const small = W < 520;
  const [w, h, d, gy] = small ? [60, 54, 7, 36] : [70, 56, 11, 44];
  const [least, pad, gap] = small ? [17, 10, 10] : [40, 18, 40];
  const [top, low] = [d + (small ? 24 : 28), 24];
  const sizes = view.order.map(a => run.shape[a]).filter(size => size > 1);
  const inner = sizes.at(-1) ?? 1;
  const here = min(view.per, run.n);
  const room = floor((W - 2 * pad - d + least) / (w + least));
  const cols = here < inner ? min(here, room) : most(inner, room);
  const gx = cols < 3 ? max(least, 32) : least;
  const plane = min(here, inner * (sizes.at(-2) ?? 1));
  const [rows, planes] = [ceil(plane / cols), ceil(here / plane)];
  const [pw, ph, pg] = [cols * (w + gx) - gx + d, rows * (h + gy), gx + 14]; // of a plane, and between two
  const beside = most(planes, max(1, floor((W - 2 * pad + pg) / (pw + pg))));
  const nw = beside * (pw + pg) - pg + 2 * pad;
  const nh = top + (planes / beside) * ph - gy + 14 + low;
  const fits = max(1, floor((W + gap) / (nw + gap)));
  const nodesAcross = ceil(view.nodes / ceil(view.nodes / fits));
  const x0 = max(0, (W - nodesAcross * (nw + gap) + gap) / 2);
  const frames = range(view.nodes, i => {
    return { x: x0 + (i % nodesAcross) * (nw + gap), y: 2 + floor(i / nodesAcross) * (nh + 12) };
  });
  const place = view.number.map(x => {
    const frame = frames[floor(x / view.per)];
    const l = x % view.per;
    const [p, q] = [floor(l / plane), l % plane];
    const [column, row] = [q % cols, floor(q / cols)];
    return {
      x: frame.x + pad + (p % beside) * (pw + pg) + column * (w + gx),
      y: frame.y + top + floor(p / beside) * ph + row * (h + gy),
      first: column === 0 && cols > 1,
      odd: [column % 2, row % 2],
    };
  });
  const H = 2 + ceil(view.nodes / nodesAcross) * (nh + 12) - 10;
  return { W, H, small, pad, w, h, d, gx, gy, nw, nh, frames, place };
}

/** A line between two ranks that passes behind no other rank. */
function route(a, b, set) {
  const { w, h, d, place } = set;
  const [A, B] = [place[a], place[b]];
  if (A.y === B.y) return sideways(A, B, set);
  const [T, U] = A.y < B.y ? [A, B] : [B, A];
  const flip = T !== A;
  const [x1, x2, y1, y2] = [T.x + (w + d) / 2, U.x + (w + d) / 2, T.y + h, U.y - d];
  const bend = (y2 - y1) / 2;
  if (A.x !== B.x) return { flip, d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}` };
  if (!between(place, T, U, "y", "x")) return { flip, d: `M${x1} ${y1}V${y2}` };
  const side = T.first ? T.x : T.x + w + d;
  const out = side + (T.first ? -1 : 1) * set.gx * (T.odd[1] ? 0.6 : 1.1);
  const [m1, m2] = [T.y + (h - d) / 2, U.y + (h - d) / 2];
  const half = (m1 + m2) / 2;
  return { flip, d: `M${side} ${m1}C${out} ${m1} ${out} ${m1 + 10} ${out} ${half}S${out} ${m2} ${side} ${m2}` };
}

function between(place, p, q, along, same) {
  const inside = C => C[along] > min(p[along], q[along]) && C[along] < max(p[along], q[along]);
  return place.some(C => C[same] === p[same] && inside(C));
}

function sideways(A, B, { w, h, d, gy, place }) {
  const [L, R] = A.x < B.x ? [A, B] : [B, A];
  const flip = L !== A;
  const y = A.y + (h - d) / 2;
  if (!between(place, L, R, "x", "y")) return { flip, d: `M${L.x + w + d} ${y}H${R.x}` };
  const up = 1.33 * (gy - d) * (L.odd[0] ? 0.4 : 0.78);
  const lean = min(40, (R.x - L.x) / 5);
  const [x1, x2, top] = [L.x + w / 2 + d, R.x + w / 2, A.y - d];
  return { flip, d: `M${x1} ${top}C${x1 + lean} ${top - up} ${x2 - lean} ${top - up} ${x2} ${top}` };
}

/** Returns what paints a moment; from: where ranks were before. */
function stageOf(parent, run, view, W, name, from) {
  const set = plan(run, view, W);
  const { rest, move } = canvas(parent, W, set.H, { role: "group", "aria-label": name });
  for (const { x, y } of set.frames) make("rect.lk-node", rest, { x, y, width: set.nw, height: set.nh, rx: 12 });
  const wires = make("g", rest);
  // Names stand above the links, and on both sides of one that goes down; narrow nodes have room on one of them.
  set.frames.forEach(({ x, y }, i) => {
    const beside = { x: x + set.pad + (set.w + set.d) / 2 + 10, y: y + set.nh - 9 };
    make("text.lk-name", rest, set.small ? beside : { ...beside, x: x + 9 }, "node " + i);
    if (view.per > 1 && !set.small) make("text.lk-name", rest, beside, common(run, view, i).join(" · "));
  });
  const cubes = view.who.map(r => cube(rest, run, view, r, set));
  if (from && !matchMedia("(prefers-reduced-motion: reduce)").matches) glide(cubes, wires, from, set.place);
  let under;
  let ghosts = [];
  const paint = ({ k, f, look, picked }) => {
    const stop = look ? null : run.stops[k];
    const key = look ? "rank " + picked : k;
    if (under !== key) {
      under = key;
      const links = stop ? stop.sent : linksOf(run, picked);
      lightUp(cubes, run, stop, links, picked);
      wires.replaceChildren();
      move.replaceChildren();
      ghosts = drawLinks(wires, move, run, view, links, set, !!stop);
    }
    const u = 0.62 * ease(f);
    for (const { g, path, length, flip } of ghosts) {
      const { x, y } = path.getPointAtLength(length * (flip ? 1 - u : u));
      g.setAttribute("transform", `translate(${x.toFixed(1)},${y.toFixed(1)})`);
    }
  };
  return { place: set.place, paint };
}

/** Ranks move to their new places, then links appear. */
function glide(cubes, wires, from, place) {
  const at = ({ x, y }) => ({ transform: `translate(${x}px,${y}px)` });
  cubes.forEach(({ g, r }) => g.animate([at(from[r]), at(place[r])], { duration: 500, easing: "ease-in-out" }));
  wires.animate([{ opacity: 0 }, { opacity: 0, offset: 0.7 }, { opacity: 1 }], 700);
}

/** The ranks of a stop, or the groups of a rank. */
function lightUp(cubes, run, stop, links, picked) {
  const doing = new Map(stop?.work.flatMap(([kind, m, ranks]) => ranks.map(r => [r, [kind, m]])));
  const groups = () => range(run.A, a => run.group(picked, a)).flat();
  const ends = links.flatMap(({ src, dst }) => [src, dst]);
  const mates = new Set(stop ? [...doing.keys(), ...ends] : groups());
  for (const { mark } of cubes) mark(mates, picked, doing);
}

/** The coordinates that all ranks of a node have in common. */
function common(run, view, node) {
  const own = range(run.n).filter(r => view.node[r] === node);
  const same = a => run.shape[a] > 1 && own.every(r => run.at[r][a] === run.at[own[0]][a]);
  return view.order
    .filter(same)
    .slice(0, 2)
    .map(a => `${run.axes[a]} ${run.at[own[0]][a]}`);
}

/** The links of a rank's groups: those that carry something, or else from each to the next. */
function linksOf(run, r) {
  const names = range(run.names.length, name => {
    const group = name < run.A ? run.group(r, name) : range(run.n);
    const among = flow => flow.axis === name && group.includes(flow.src) && group.includes(flow.dst);
    const own = flow => name < run.A || flow.src === r || flow.dst === r;
    const sent = run.flows.filter(flow => among(flow) && own(flow));
    if (sent.length || name >= run.A) return sent;
    return group.slice(1).map((q, i) => ({ axis: name, src: group[i], dst: q, bytes: 0 }));
  });
  return names.flat();
}

/** Returns what travels. */
function drawLinks(wires, move, run, view, links, set, moving) {
  const paths = new Map();
  const ends = link => [min(link.src, link.dst), max(link.src, link.dst)];
  const pair = link => [link.axis, ...ends(link)].join();
  for (const link of links) {
    if (paths.has(pair(link))) continue;
    const { d, flip } = route(...ends(link), set);
    const g = make("g", wires, { "data-link": pair(link) });
    if (view.crosses(link)) for (const part of ["tube", "tube in"]) make("path.lk-" + part, g, { d });
    paths.set(pair(link), { path: make("path.lk-wired " + style(run, link.axis), g, { d }), flip });
  }
  if (!moving) return [];
  return links.map(link => {
    const { path, flip } = paths.get(pair(link));
    const g = make(link.label ? "g.lk-sent" : "g", move);
    if (link.label) {
      make("rect", g, { x: -11, y: -8, width: 22, height: 16, rx: 8 });
      make("text", g, { y: 4, "text-anchor": "middle" }, link.label);
    } else make("circle.lk-dot " + style(run, link.axis), g, { r: 5 });
    return { g, path, length: path.getTotalLength(), flip: flip !== link.src > link.dst };
  });
}

/** A rank; mark() sets how it looks now. */
function cube(parent, run, view, r, { w, h, d, place }) {
  const { x, y } = place[r];
  const attrs = { transform: `translate(${x},${y})`, role: "img", tabindex: -1, "data-r": r };
  const g = make("g.lk-cube", parent, attrs);
  const middle = { "text-anchor": "middle" };
  make("path.lk-top", g, { d: `M0 0l${d}-${d}h${w}l-${d} ${d}z` });
  make("path.lk-side", g, { d: `M${w} 0l${d}-${d}v${h}l-${d} ${d}z` });
  make("rect.lk-face", g, { width: w, height: h, rx: 2 });
  make("circle", g, { cx: 10, cy: 28, r: 4, fill: color(view.number[r]) });
  make("text.lk-rank", g, { x: w / 2, y: 17, ...middle }, "rank " + view.number[r]);
  make("text", g, { x: w / 2 + 6, y: 32, ...middle }, view.order.map(a => run.at[r][a]).join(" "));
  const band = make("rect.lk-does", g, { x: 5, y: h - 18, width: w - 10, height: 14, rx: 3 });
  const text = make("text.lk-doing", g, { x: w / 2, y: h - 7, ...middle });
  const where = `rank ${view.number[r]}: ${placeOf(run, view, r)}`;
  const mark = (mates, picked, doing) => {
    const [kind = "", m = ""] = doing.get(r) ?? [];
    g.setAttribute("class", `lk-cube ${r === picked ? "on" : ""} ${mates.has(r) ? "mate" : "dim"}`);
    g.setAttribute("tabindex", r === picked ? 0 : -1);
    g.setAttribute("aria-label", where + (kind && `; ${KINDS[kind]} of micro-batch ${m}`));
    band.setAttribute("class", "lk-does " + kind);
    text.textContent = kind + m;
  };
  return { g, r, mark };
}

function placeOf(run, view, r) {
  const at = view.order.map(a => `${run.axes[a]} ${run.at[r][a]}`).join(", ");
  return at + (view.nodes > 1 ? `, on node ${view.node[r]}` : "");
}

// # words
function asGiven(run) {
  return run.source === "simulated" ? "as simulated" : "as recorded";
}

function begin(run, view) {
  const first = seated(run, run.home, run.per);
  const moved = view.per !== run.per || view.order.some((a, i) => a !== i);
  const nodes = view.nodes > 1 ? `${view.nodes} nodes of ${view.per}` : "one node";
  const axes = view.order.map(a => `${run.axes[a]} ${run.shape[a]}`).join(" · ");
  const home = `${named(run, run.home)} and ${run.per} on a node`;
  const recorded = `${bytes(across(run.flows, first))} ${asGiven(run)}, ${home}.`;
  const now = `${bytes(across(run.flows, view))} cross nodes ${run.span}`;
  const crosses = view.nodes > 1 ? now : "nothing crosses nodes";
  const hint = moved ? `; ${recorded}` : ". Touch a rank, and its groups light up.";
  return [[`${num(run.n, "rank")} on ${nodes}, ${axes}:`, ` ${crosses}${hint}`]];
}

function told(run, view, k) {
  if (!k) return begin(run, view);
  const { kind, say, sent } = run.stops[k];
  const [out, all] = [across(sent, view), sum(sent, flow => flow.bytes)];
  const some = out ? ` ${bytes(out)} of ${bytes(all)} cross nodes.` : " None of it leaves its node.";
  const more = out === all ? " All of it crosses nodes." : some;
  const now = parts => parts.map(part => (typeof part === "number" ? view.number[part] : part)).join("");
  const sentences = say.map(([stress, rest]) => [now(stress), now(rest) + " ", kind === "stuck"]);
  return [...sentences, ["", sent.length ? more : ""]];
}

function figuresOf(run, view) {
  const all = run.orders.map(order => [across(run.flows, seated(run, order, view.per)), order]);
  const now = across(run.flows, view);
  const [least, worst] = [min, max].map(of => of(...all.map(([size]) => size)));
  const which = x => (now === x ? "as it is now" : named(run, all.find(([size]) => size === x)[1]));
  const recorded = across(run.flows, seated(run, run.home, run.per));
  return [
    [bytes(now), `cross nodes ${run.span}`],
    [bytes(recorded), `${asGiven(run)}: ${named(run, run.home)}, ${run.per} on a node`],
    [bytes(least), `at least: ${which(least)}`],
    [bytes(worst), `at most: ${which(worst)}`],
    [bytes(sum(run.flows, flow => flow.bytes)), `sent by all ranks ${run.span}`],
  ];
}

/** Which ranks a rank shares an axis with, and what it sends along it. */
function sharing(run, view, r, name) {
  const mine = run.flows.filter(flow => flow.axis === name && flow.src === r);
  const group = name < run.A ? run.group(r, name) : [...new Set(mine.map(flow => flow.dst))];
  const mates = group.filter(q => q !== r);
  if (!mates.length) return ["alone: no other rank", "nothing to send"];
  const where = mates.some(q => view.node[q] !== view.node[r]) ? "across nodes" : "inside the node";
  const size = sum(mine, flow => flow.bytes);
  const numbers = mates.map(q => view.number[q]).sort((a, b) => a - b);
  const who = `with rank${mates.length > 1 ? "s" : ""} ${and(numbers)} · ${where}`;
  return [who, size ? `sends ${bytes(size)} ${run.span}` : "sends nothing"];
}

// # legend: a card for each axis, from the outermost in, which can be moved
function legend(parent, run, move) {
  const box = make("div.lk-axes", parent);
  const cards = run.names.map((name, a) => axisCard(box, run, name, a, move));
  for (const { card, grip, buttons } of cards) {
    const to = other =>
      move(
        cards.findIndex(c => c.card === card),
        [...box.children].indexOf(other),
        true,
      );
    if (buttons.length) drag(card, grip, to, () => cards.slice(0, run.A).map(c => c.card));
  }
  let laid = run.home;
  const lay = order => {
    const had = document.activeElement;
    for (const b of order.toReversed()) box.prepend(cards[b].card);
    if (box.contains(had)) had.focus(); // an element that is moved in the page loses the focus
  };
  return (view, r) => {
    if (laid !== view.order) lay((laid = view.order));
    cards.forEach(({ size, buttons, lines }, a) => {
      const i = view.order.indexOf(a);
      const ends = { 0: "outermost", [run.A - 1]: "innermost" };
      buttons.forEach((b, j) => (b.ariaDisabled = i === (j ? run.A - 1 : 0)));
      size.textContent = run.A > 1 && a < run.A ? (ends[i] ?? "") : "";
      sharing(run, view, r, a).forEach((text, j) => (lines[j].textContent = text));
    });
  };
}

function axisCard(box, run, name, a, move) {
  const card = make("div.lk-axis", box, { role: "group", "aria-label": "axis " + name });
  const grip = make("div.lk-grip" + (a < run.A ? " can" : ""), card);
  const line = make("svg", grip, { viewBox: "0 0 34 13", "aria-hidden": true });
  make("path.lk-wired " + style(run, a), line, { d: "M2 6.5H32" });
  make("b", grip, {}, name);
  const size = make("i", grip);
  const ways = [
    [-1, "‹", `Move ${name} out`],
    [1, "›", `Move ${name} in`],
  ];
  const movable = a < run.A && run.A > 1;
  const turns = make("div.lk-ways", card);
  const buttons = (movable ? ways : []).map(([by, text, words]) => {
    const b = pill(turns, text, words, () => b.ariaDisabled === "true" || move(a, by));
    b.ariaLabel = words;
    return b;
  });
  return { card, grip, size, buttons, lines: [make("span", card), make("span", card)] };
}

/** A card that is dropped on another takes its place. */
function drag(card, grip, drop, cards) {
  let start = null;
  grip.onpointerdown = e => {
    start = e;
    grip.setPointerCapture(e.pointerId);
    card.classList.add("held");
  };
  grip.onpointermove = e => {
    if (!start) return;
    card.style.transform = `translate(${e.clientX - start.clientX}px,${e.clientY - start.clientY}px)`;
  };
  grip.onpointerup = grip.onpointercancel = e => {
    if (!start) return;
    start = null;
    card.style.transform = "";
    card.classList.remove("held");
    const away = other => {
      const b = other.getBoundingClientRect();
      return Math.hypot(b.left + b.width / 2 - e.clientX, b.top + b.height / 2 - e.clientY);
    };
    const over = cards().reduce((a, b) => (away(b) < away(a) ? b : a));
    if (e.type === "pointerup" && over !== card) drop(over);
  };
}

// # widget
function mountMesh(el, data, opts) {
  const run = decode(data);
  const rate = step => (step ? 1.4 : 0.7);
  const state = { t: 0, speed: 1, playing: false, stops: () => range(run.S + 1), wait: () => false, rate };
  let view = seated(run, run.home, run.per);
  let picked = 0;
  let [look, fresh] = [true, true]; // whether a rank's groups are shown; whether the caption is about the view
  let stage, shown, said;
  const ui = shell(el, data, state, { build, draw, turn });
  const { root, field, caption } = ui;
  ui.source.textContent = run.source;
  const who = make("p.lk-who lk-small", root);
  const show = legend(make("div.lk-small", root), run, move);
  const foot = footer(root, 5);
  const sizes = run.sizes.map(per => [per, per]);
  const size = choice(ui.more, "on a node", "ranks on a node", sizes, run.per, per => seat(view.order, +per));
  pill(ui.more, asGiven(run), `Axes and nodes ${asGiven(run)}`, () => {
    size.value = run.per;
    seat(run.home, run.per);
  });
  ui.scrub.build(
    range(run.S + 1),
    run.stops.slice(1).map(stop => stop.phase),
  );

  function seat(order, per) {
    const from = stage.place;
    view = seated(run, order, per);
    fresh = true;
    build(from);
    draw();
  }
  /** Move an axis inwards by so many places, or to a given place. */
  function move(a, by, to) {
    const order = view.order.filter(b => b !== a);
    order.splice(to ? by : clamp(view.order.indexOf(a) + by, run.A - 1), 0, a);
    seat(order, view.per);
  }
  function build(from) {
    const focused = field.contains(document.activeElement);
    field.replaceChildren();
    stage = stageOf(field, run, view, ui.width || 320, data.title, from);
    if (focused) field.querySelector(`[data-r="${picked}"]`).focus();
    const joined = text => text.replace(/ (k|M|G)?B/g, "\u00a0$1B");
    foot(figuresOf(run, view).map(pair => pair.map(joined)));
    reserve(
      caption,
      range(run.S + 1, k => told(run, view, k)),
    );
    said = null;
  }
  function draw() {
    if (!stage) return;
    const { t, playing } = state;
    const [k, now] = [clamp(ceil(t - EPS), run.S), clamp(floor(t + EPS), run.S)];
    if (shown !== t) look = fresh = t === 0;
    shown = t;
    stage.paint({ k, f: t - k + 1, look: look || k === 0, picked });
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    const text = fresh ? begin(run, view) : told(run, view, k);
    if (said !== plain(text)) write(caption, text);
    said = plain(text);
    const tube = view.nodes > 1 ? "A link in a tube goes from node to node." : "";
    const name = make("b", null, {}, "Rank " + view.number[picked]);
    who.replaceChildren(name, ` is at ${placeOf(run, view, picked)}. ${tube}`);
    show(view, picked);
    ui.scrub.set(t, now, plain(told(run, view, now)), k - 1);
    ui.control.paint();
    const order = view.order.map(a => run.axes[a]).join(" ");
    const seats = { ranks: run.n, order, per: view.per, across: across(run.flows, view) };
    Object.assign(root.dataset, { step: now, steps: run.S, playing, ...seats });
    opts.onChange?.({ step: now, playing });
  }
  function pick(e) {
    const g = e.target.closest(".lk-cube");
    if (!g || state.playing) return;
    picked = +g.dataset.r;
    look = true;
    draw();
  }
  /** To the rank with the next number. */
  function turn(by) {
    const next = clamp(view.number[picked] + (field.contains(document.activeElement) ? by : 0), run.n - 1);
    field.querySelector(`[data-r="${view.who[next]}"]`).focus();
  }
  field.onpointerover = pick;
  field.onpointerdown = pick;
  field.addEventListener("focusin", pick);
  field.onpointerleave = () => {
    if (field.contains(document.activeElement)) return;
    look = state.t === 0;
    draw();
  };
  ui.rebuild();
  return { ...ui, state };
}

define("mesh", () => mountMesh);
