/* Lockstep's mesh explorer: ranks on their nodes, their groups along each axis, and what a recorded step sends where.
   mesh_data.py says what the data mean. Ranks have the numbers of the trace; a view numbers and seats them anew. */
(() => {
const { EPS, range, clamp, make, canvas, color, and, bytes, pill, footer, shell, define } = globalThis.lockstepControls;
const { min, max, abs, ceil, floor } = Math, KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const sum = list => list.reduce((a, b) => a + b, 0), most = (n, room) => range(n, i => n - i).find(m => n % m === 0 && m <= room); // the largest divisor that has room
const num = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;

// # data
function permutations(list) { return list.length < 2 ? [list] : list.flatMap((x, i) => permutations(list.toSpliced(i, 1)).map(rest => [x, ...rest])); }

function decode(raw) {
  const n = raw.shape.reduce((a, b) => a * b, 1), A = raw.axes.length;
  const at = range(n, r => raw.shape.map((size, a) => floor(r / raw.shape.slice(a + 1).reduce((x, y) => x * y, 1)) % size));
  const run = { ...raw, n, A, at, S: raw.stops.length, home: range(A), orders: permutations(range(A)) };
  run.group = (r, a) => range(n).filter(q => at[q].every((x, b) => b === a || x === at[r][b]));
  const moved = ([name, list], label) => range(list.length / 3, i => ({ name, label, src: list[3 * i], dst: list[3 * i + 1], size: list[3 * i + 2] }));
  run.stops = raw.stops.map(([kind, said, work, sent]) => ({ kind, said, work, sent: range(sent.length / 2, i => moved(raw.sent[sent[2 * i]], sent[2 * i + 1])).flat() }));
  run.flows = raw.flows.map(([name, src, dst, size]) => ({ name, src, dst, size }));
  return run;
}

function seated(run, order, per) { // who is where in this order of the axes, with so many ranks on a node
  const number = run.at.map(at => order.reduce((before, a) => before * run.shape[a] + at[a], 0)), node = number.map(x => floor(x / per)), who = [];
  number.forEach((x, r) => { who[x] = r; });
  return { order, per, number, node, who, nodes: ceil(run.n / per), crosses: ({ src, dst }) => node[src] !== node[dst] };
}
const across = (flows, view) => sum(flows.filter(view.crosses).map(flow => flow.size));
const named = (run, order) => order.map(a => run.axes[a]).join("\u00a0·\u00a0"), style = (run, name) => "x" + (name < run.A ? run.A - 1 - name : 4);

// # stage: nodes as frames, in each the ranks in the order of their numbers, along the innermost axis first
function plan(run, view, W) {
  const small = W < 520, [w, h, d, gy] = small ? [60, 54, 7, 36] : [70, 56, 11, 44], least = small ? 17 : 40, pad = small ? 10 : 18, top = d + (small ? 24 : 28), low = 24;
  const sizes = view.order.map(a => run.shape[a]).filter(size => size > 1), inner = sizes.at(-1) ?? 1, here = min(view.per, run.n), room = floor((W - 2 * pad - d + least) / (w + least));
  const cols = here < inner ? min(here, room) : most(inner, room), gx = cols < 3 ? max(least, 32) : least, plane = min(here, inner * (sizes.at(-2) ?? 1)), rows = ceil(plane / cols), planes = ceil(here / plane);
  const pw = cols * (w + gx) - gx + d, ph = rows * (h + gy), beside = most(planes, max(1, floor((W - 2 * pad + gx + 14) / (pw + gx + 14))));
  const nw = beside * (pw + gx + 14) - gx - 14 + 2 * pad, nh = top + planes / beside * ph - gy + 14 + low;
  const gap = small ? 10 : 40, fits = max(1, floor((W + gap) / (nw + gap))), across = ceil(view.nodes / ceil(view.nodes / fits)), x0 = max(0, (W - across * (nw + gap) + gap) / 2);
  const frames = range(view.nodes, i => ({ x: x0 + i % across * (nw + gap), y: 2 + floor(i / across) * (nh + 12) }));
  const place = view.number.map(x => {
    const { x: fx, y: fy } = frames[floor(x / view.per)], l = x % view.per, p = floor(l / plane), q = l % plane;
    return { x: fx + pad + p % beside * (pw + gx + 14) + q % cols * (w + gx), y: fy + top + floor(p / beside) * ph + floor(q / cols) * (h + gy), first: q % cols === 0 && cols > 1, odd: [q % cols % 2, floor(q / cols) % 2] };
  });
  return { W, small, pad, H: 2 + ceil(view.nodes / across) * (nh + 12) - 10, w, h, d, gx, gy, nw, nh, frames, place };
}

function route(a, b, { w, h, d, gx, gy, place }) { // a line between two ranks that goes behind no other
  const A = place[a], B = place[b], between = (p, q, along, same) => place.some(C => C[same] === p[same] && C[along] > min(p[along], q[along]) && C[along] < max(p[along], q[along]));
  if (A.y === B.y) {
    const [L, R] = A.x < B.x ? [A, B] : [B, A], y = A.y + (h - d) / 2, far = R.x - L.x, up = 1.33 * (gy - d) * (L.odd[0] ? 0.4 : 0.78), lean = min(40, far / 5);
    const x1 = L.x + w / 2 + d, x2 = R.x + w / 2, top = A.y - d;
    return { flip: L !== A, d: between(L, R, "x", "y") ? `M${x1} ${top}C${x1 + lean} ${top - up} ${x2 - lean} ${top - up} ${x2} ${top}` : `M${L.x + w + d} ${y}H${R.x}` };
  }
  const [T, U] = A.y < B.y ? [A, B] : [B, A], x1 = T.x + (w + d) / 2, x2 = U.x + (w + d) / 2, y1 = T.y + h, y2 = U.y - d, bend = (y2 - y1) / 2;
  if (A.x !== B.x) return { flip: T !== A, d: `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}` };
  if (!between(T, U, "y", "x")) return { flip: T !== A, d: `M${x1} ${y1}V${y2}` };
  const side = T.first ? T.x : T.x + w + d, out = side + (T.first ? -1 : 1) * gx * (T.odd[1] ? 0.6 : 1.1), m1 = T.y + (h - d) / 2, m2 = U.y + (h - d) / 2;
  return { flip: T !== A, d: `M${side} ${m1}C${out} ${m1} ${out} ${m1 + 10} ${out} ${(m1 + m2) / 2}S${out} ${m2} ${side} ${m2}` };
}

function stageOf(parent, run, view, W, name, from) { // returns what paints a moment; from: where ranks were before
  const set = plan(run, view, W), { w, h, d } = set, { rest, move } = canvas(parent, W, set.H, { role: "group", "aria-label": name });
  set.frames.forEach(({ x, y }, i) => {
    make("rect.lk-node", rest, { x, y, width: set.nw, height: set.nh, rx: 12 });
  });
  const wires = make("g", rest);
  set.frames.forEach(({ x, y }, i) => { // above the links, and on both sides of one that goes down
    make("text.lk-name", rest, { x: x + (set.small ? 5 : 9), y: y + set.nh - 9 }, "node " + i);
    if (view.per > 1) make("text.lk-name", rest, { x: x + set.pad + (w + d) / 2 + 10, y: y + set.nh - 9 }, held(run, view, i).join(" · "));
  });
  const cubes = view.who.map(r => cube(rest, run, view, r, set));
  if (from && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
    const at = ({ x, y }) => ({ transform: `translate(${x}px,${y}px)` });
    cubes.forEach(({ g, r }) => g.animate([at(from[r]), at(set.place[r])], { duration: 500, easing: "ease-in-out" }));
    wires.animate([{ opacity: 0 }, { opacity: 0, offset: 0.7 }, { opacity: 1 }], 700);
  }
  let under, ghosts = [];
  return { place: set.place, paint({ k, f, look, picked }) {
    const stop = look ? null : run.stops[k - 1], key = look ? "rank " + picked : k, u = 0.62 * (f < 0.5 ? 2 * f * f : 1 - 2 * (1 - f) ** 2);
    if (under !== key) {
      under = key;
      const links = (stop ? stop.sent : linksOf(run, picked)), doing = new Map(stop?.work.flatMap(([kind, m, ranks]) => ranks.map(r => [r, [kind, m]])));
      const mates = new Set(stop ? [...doing.keys(), ...links.flatMap(({ src, dst }) => [src, dst])] : range(run.A, a => run.group(picked, a)).flat());
      for (const { mark } of cubes) mark(mates, picked, doing);
      wires.replaceChildren();
      move.replaceChildren();
      ghosts = drawLinks(wires, move, run, view, links, set, !!stop);
    }
    for (const { g, path, length, flip } of ghosts) {
      const { x, y } = path.getPointAtLength(length * (flip ? 1 - u : u));
      g.setAttribute("transform", `translate(${x.toFixed(1)},${y.toFixed(1)})`);
    }
  } };
}

function held(run, view, node) { // the coordinates that all ranks of a node have in common
  const own = range(run.n).filter(r => view.node[r] === node);
  return view.order.filter(a => run.shape[a] > 1 && own.every(r => run.at[r][a] === run.at[own[0]][a])).slice(0, 2).map(a => `${run.axes[a]} ${run.at[own[0]][a]}`);
}

function linksOf(run, r) { // the links of a rank's groups: those that carry something, or else from each to the next
  const names = range(run.names.length).map(name => {
    const group = name < run.A ? run.group(r, name) : range(run.n), sent = run.flows.filter(flow => flow.name === name && group.includes(flow.src) && group.includes(flow.dst) && (name < run.A || flow.src === r || flow.dst === r));
    return sent.length || name >= run.A ? sent : group.slice(1).map((q, i) => ({ name, src: group[i], dst: q, size: 0 }));
  });
  return names.flat();
}

function drawLinks(wires, move, run, view, links, set, moving) { // returns what travels
  const paths = new Map();
  for (const link of links) {
    const pair = [link.name, min(link.src, link.dst), max(link.src, link.dst)].join();
    if (paths.has(pair)) continue;
    const { d, flip } = route(min(link.src, link.dst), max(link.src, link.dst), set), g = make("g", wires, { "data-link": pair });
    if (view.crosses(link)) for (const part of ["tube", "tube in"]) make("path.lk-" + part, g, { d });
    paths.set(pair, { path: make("path.lk-wired " + style(run, link.name), g, { d }), flip });
  }
  return !moving ? [] : links.map(link => {
    const { path, flip } = paths.get([link.name, min(link.src, link.dst), max(link.src, link.dst)].join()), g = make(link.label ? "g.lk-sent" : "g", move);
    if (link.label) {
      make("rect", g, { x: -11, y: -8, width: 22, height: 16, rx: 8 });
      make("text", g, { y: 4, "text-anchor": "middle" }, link.label);
    } else make("circle.lk-dot " + style(run, link.name), g, { r: 5 });
    return { g, path, length: path.getTotalLength(), flip: flip !== link.src > link.dst };
  });
}

function cube(parent, run, view, r, { w, h, d, place }) { // a rank; mark() says what is to be seen of it now
  const { x, y } = place[r], g = make("g.lk-cube", parent, { transform: `translate(${x},${y})`, role: "img", tabindex: -1, "data-r": r });
  make("path.lk-top", g, { d: `M0 0l${d}-${d}h${w}l-${d} ${d}z` });
  make("path.lk-side", g, { d: `M${w} 0l${d}-${d}v${h}l-${d} ${d}z` });
  make("rect.lk-face", g, { width: w, height: h, rx: 2 });
  make("circle", g, { cx: 10, cy: 28, r: 4, fill: color(view.number[r]) });
  make("text.lk-rank", g, { x: w / 2, y: 17, "text-anchor": "middle" }, "rank " + view.number[r]);
  make("text", g, { x: w / 2 + 6, y: 32, "text-anchor": "middle" }, view.order.map(a => run.at[r][a]).join(" "));
  const band = make("rect.lk-does", g, { x: 5, y: h - 18, width: w - 10, height: 14, rx: 3 }), text = make("text.lk-doing", g, { x: w / 2, y: h - 7, "text-anchor": "middle" });
  const where = `rank ${view.number[r]}: ${placeOf(run, view, r)}`;
  return { g, r, mark(mates, picked, doing) {
    const [kind = "", m = ""] = doing.get(r) ?? [];
    g.setAttribute("class", `lk-cube ${r === picked ? "on" : ""} ${mates.has(r) ? "mate" : "dim"}`);
    g.setAttribute("tabindex", r === picked ? 0 : -1);
    g.setAttribute("aria-label", where + (kind && `; ${KINDS[kind]} of micro-batch ${m}`));
    band.setAttribute("class", "lk-does " + kind);
    text.textContent = kind + m;
  } };
}
const placeOf = (run, view, r) => `${view.order.map(a => `${run.axes[a]} ${run.at[r][a]}`).join(", ")}${view.nodes > 1 ? `, on node ${view.node[r]}` : ""}`;

// # words
function begin(run, view) {
  const now = across(run.flows, view), first = seated(run, run.home, run.per), moved = view.per !== run.per || view.order.some((a, i) => a !== i);
  const nodes = view.nodes > 1 ? `${view.nodes} nodes of ${view.per}` : "one node", axes = view.order.map(a => `${run.axes[a]} ${run.shape[a]}`).join(" · ");
  const before = `; ${bytes(across(run.flows, first))} as recorded, ${named(run, run.home)} and ${run.per} on a node.`;
  return [[`${num(run.n, "rank")} on ${nodes}, ${axes}:`, ` ${view.nodes > 1 ? `${bytes(now)} cross a node ${run.span}` : "nothing crosses a node"}${moved ? before : ". Touch a rank, and its groups light up."}`]];
}

function told(run, view, k) {
  const { kind, said, sent } = run.stops[k - 1], out = across(sent, view), all = sum(sent.map(flow => flow.size));
  const more = !sent.length ? "" : out === all ? " All of it crosses a node." : out ? ` ${bytes(out)} of ${bytes(all)} cross a node.` : " None of it leaves its node.";
  const now = text => text.replace(/@(\d+)/g, (_, r) => view.number[r]);
  return [...said.map(([stress, rest]) => [now(stress), now(rest) + " ", kind === "stuck"]), ["", more]];
}

function figuresOf(run, view) {
  const all = run.orders.map(order => [across(run.flows, seated(run, order, view.per)), order]), now = across(run.flows, view), least = min(...all.map(x => x[0])), worst = max(...all.map(x => x[0]));
  const which = x => (now === x ? "as it is now" : named(run, all.find(y => y[0] === x)[1]));
  return [[bytes(now), `cross a node ${run.span}`], [bytes(across(run.flows, seated(run, run.home, run.per))), `as recorded: ${named(run, run.home)}, ${run.per} on a node`],
    [bytes(least), `at least: ${which(least)}`], [bytes(worst), `at most: ${which(worst)}`], [bytes(sum(run.flows.map(flow => flow.size))), `sent by all ranks ${run.span}`]];
}

function sharing(run, view, r, name) { // with whom a rank shares an axis, and what it sends along it
  const mine = run.flows.filter(flow => flow.name === name && flow.src === r), mates = (name < run.A ? run.group(r, name) : [...new Set(mine.map(flow => flow.dst))]).filter(q => q !== r);
  if (!mates.length) return ["alone: no other rank", "nothing to send"];
  const out = mates.some(q => view.node[q] !== view.node[r]), size = sum(mine.map(flow => flow.size));
  return [`with rank${mates.length > 1 ? "s" : ""} ${and(mates.map(q => view.number[q]).sort((a, b) => a - b))} · ${out ? "across nodes" : "inside the node"}`, size ? `sends ${bytes(size)} ${run.span}` : "sends nothing"];
}

// # legend: a card for each axis, from the outermost in, which can be moved
function legend(parent, run, move) {
  const box = make("div.lk-axes", parent), cards = run.names.map((name, a) => {
    const card = make("div.lk-axis", box, { role: "group", "aria-label": "axis " + name }), grip = make("div.lk-grip" + (a < run.A ? " can" : ""), card), line = make("svg", grip, { viewBox: "0 0 34 13", "aria-hidden": true });
    make("path.lk-wired " + style(run, a), line, { d: "M2 6.5H32" });
    make("b", grip, {}, name);
    const size = make("i", grip), buttons = a < run.A && run.A > 1 ? [[-1, "‹", `Move ${name} out`], [1, "›", `Move ${name} in`]].map(([by, text, words]) => {
      const b = pill(grip, text, words, () => b.ariaDisabled === "true" || move(a, by));
      b.ariaLabel = words;
      return b;
    }) : [];
    if (buttons.length) drag(card, grip, over => move(a, [...box.children].indexOf(over), true), () => cards.slice(0, run.A).map(c => c.card));
    return { card, size, buttons, lines: [make("span", card), make("span", card)] };
  });
  let laid = run.home;
  return (view, r) => cards.forEach(({ size, buttons, lines }, a) => {
    const i = view.order.indexOf(a), had = document.activeElement;
    if (laid !== (laid = view.order)) {
      for (const b of view.order.toReversed()) box.prepend(cards[b].card);
      if (box.contains(had)) had.focus(); // what moves in the page loses it
    }
    buttons.forEach((b, j) => { b.ariaDisabled = i === (j ? run.A - 1 : 0); });
    size.textContent = a >= run.A ? "" : run.A > 1 && i === 0 ? "outermost" : run.A > 1 && i === run.A - 1 ? "innermost" : "";
    sharing(run, view, r, a).forEach((text, j) => { lines[j].textContent = text; });
  });
}

function drag(card, grip, drop, cards) { // let go over another card, it takes that one's place
  let start = null;
  grip.onpointerdown = e => {
    if (e.target.closest("button")) return;
    start = e;
    grip.setPointerCapture(e.pointerId);
    card.classList.add("held");
  };
  grip.onpointermove = e => { if (start) card.style.transform = `translate(${e.clientX - start.clientX}px,${e.clientY - start.clientY}px)`; };
  grip.onpointerup = grip.onpointercancel = e => {
    if (!start) return;
    start = null;
    card.style.transform = "";
    card.classList.remove("held");
    const away = other => { const b = other.getBoundingClientRect(); return Math.hypot(b.left + b.width / 2 - e.clientX, b.top + b.height / 2 - e.clientY); };
    const over = cards().reduce((a, b) => (away(b) < away(a) ? b : a));
    if (e.type === "pointerup" && over !== card) drop(over);
  };
}

// # widget
function mountMesh(el, data, opts) {
  const run = decode(data), state = { t: 0, speed: 1, playing: false, stops: () => range(run.S + 1), wait: () => false, rate: step => (step ? 1.4 : 0.7) };
  let view = seated(run, run.home, run.per), stage, shown, picked = 0, look = true, fresh = true, said;
  const ui = shell(el, data, state, { build, draw, turn }), { root, field, caption } = ui;
  ui.source.textContent = run.source;
  const who = make("p.lk-who lk-small", root), show = legend(make("div.lk-small", root), run, move), foot = footer(root, 5);
  const label = make("label.lk-pill", ui.more, {}, "on a node "), size = make("select", label, { "aria-label": "ranks on a node" });
  for (const per of run.sizes) make("option", size, { value: per }, per);
  size.value = run.per;
  size.onchange = () => seat(view.order, +size.value);
  pill(ui.more, "as recorded", "Axes and nodes as recorded", () => { size.value = run.per; seat(run.home, run.per); });
  ui.scrub.build(range(run.S + 1), run.stops.map(({ kind }) => ({ work: 0, message: 1 })[kind] ?? 2).join(""));

  function seat(order, per) {
    const from = stage.place;
    view = seated(run, order, per);
    fresh = true;
    build(from);
    draw();
  }
  function move(a, by, to) { // so many places in, or to this place
    const order = view.order.filter(b => b !== a);
    order.splice(to ? by : clamp(view.order.indexOf(a) + by, run.A - 1), 0, a);
    seat(order, view.per);
  }
  function build(from) {
    const focused = field.contains(document.activeElement);
    field.replaceChildren();
    stage = stageOf(field, run, view, ui.width || 320, data.title, from);
    if (focused) field.querySelector(`[data-r="${picked}"]`).focus();
    foot(figuresOf(run, view).map(pair => pair.map(text => text.replace(/ (k|M|G)?B/g, "\u00a0$1B"))));
    caption.style.minHeight = ""; // room for the longest caption, so that nothing below it moves
    caption.style.minHeight = max(...range(run.S + 1, k => { write(k ? told(run, view, k) : begin(run, view)); return caption.clientHeight; })) + "px";
    said = null;
  }
  function write(sentences) { caption.replaceChildren(...sentences.flatMap(([stress, rest, wrong]) => [make("b", null, wrong ? { class: "lk-wrong" } : {}, stress), rest])); }
  function draw() {
    if (!stage) return;
    const { t, playing } = state, k = clamp(ceil(t - EPS), run.S), now = clamp(floor(t + EPS), run.S);
    if (shown !== (shown = t)) [look, fresh] = [t === 0, t === 0];
    stage.paint({ k, f: t - k + 1, look: look || k === 0, picked });
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    const text = fresh || !k ? begin(run, view) : told(run, view, k), key = text.flat().join("");
    if (said !== (said = key)) write(text);
    who.replaceChildren(make("b", null, {}, "Rank " + view.number[picked]), ` is at ${placeOf(run, view, picked)}. ${view.nodes > 1 ? "A link in a tube goes from node to node." : ""}`);
    show(view, picked);
    ui.scrub.set(t, now, now ? told(run, view, now).flat().filter(x => typeof x === "string").join("") : begin(run, view).flat().join(""), k - 1);
    ui.control.paint();
    Object.assign(root.dataset, { step: now, steps: run.S, playing, ranks: run.n, order: view.order.map(a => run.axes[a]).join(" "), per: view.per, across: across(run.flows, view) });
    opts.onChange?.({ step: now, playing });
  }
  function pick(e) {
    const g = e.target.closest(".lk-cube");
    if (!g || state.playing) return;
    picked = +g.dataset.r;
    look = true;
    draw();
  }
  function turn(by) { // to the rank with the next number
    const next = clamp(view.number[picked] + (field.contains(document.activeElement) ? by : 0), run.n - 1);
    field.querySelector(`[data-r="${view.who[next]}"]`).focus();
  }
  field.onpointerover = pick;
  field.onpointerdown = pick;
  field.addEventListener("focusin", pick);
  field.onpointerleave = () => { if (!field.contains(document.activeElement)) { look = state.t === 0; draw(); } };
  ui.rebuild();
  return { ...ui, state };
}

define("mesh", () => mountMesh);
})();
