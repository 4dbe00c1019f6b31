/* Lockstep's bucket timeline: a backward pass on every rank, its buckets and their all-reduces on one clock. timeline.py
   says what the data mean; nothing is drawn that they don't say. */
(() => {
const { range, clamp, make, color, and, seconds, bytes, choices, footer, shell, define } = globalThis.lockstepControls, { TICKS, fit, lanes, axis } = globalThis.lockstepLanes;
const { min, max, round } = Math, COLOURS = 4;
const sum = (list, of = x => x) => list.reduce((all, x) => all + of(x), 0), upper = text => text[0].toUpperCase() + text.slice(1);

// # data
function decode(data, raw) {
  const { duration_s, figures: { hidden_s, communication_s } } = raw;
  const ranks = raw.ranks.map(p => {
    const { of, in: into, gap, len, exposed } = raw.programs[p], grads = [];
    len.forEach((ticks, i) => {
      const a = (grads.at(-1)?.z ?? 0) + (gap?.[i] ?? 0), which = of?.[i] ?? i;
      grads.push({ name: data.names[which], size: data.sizes[which], b: into[i], a, z: a + ticks });
    });
    return { grads, exposed, over: grads.at(-1)?.z ?? 0 };
  });
  const flights = raw.flights.map(([b, a, z, size, on = range(raw.n)]) => ({ b, a, z, size, on }));
  const buckets = raw.buckets.map((number, b) => {
    const grads = ranks.map(rank => rank.grads.filter(g => g.b === b)), own = flights.filter(f => f.b === b), known = number >= 0;
    return { b, known, grads, flights: own, sizes: grads.map(list => sum(list, g => g.size)), full: grads.map(list => list.at(-1)?.z), label: known ? "" + number : own.length ? "?" : "–",
      name: known ? "bucket " + number : own.length ? "an unknown bucket" : "no bucket", c: known ? `var(--b${number % COLOURS})` : "var(--soft)" };
  });
  const stops = new Set([0, TICKS, ...ranks.flatMap(rank => rank.grads.map(g => g.z)), ...flights.flatMap(f => [f.a, f.z])]);
  return { ...raw, ranks, flights, buckets, num: buckets.filter(bucket => bucket.known).length, size: max(...ranks.map(rank => sum(rank.grads, g => g.size))),
    over: max(...ranks.map(rank => rank.over)), stops: [...stops].sort((a, b) => a - b), hidden: communication_s ? `${round(hidden_s / communication_s * 100)} %` : "", at: t => (t ? seconds(t / TICKS * duration_s) : "0 s") };
}

function stateOf({ flights, grads }, r, t) { // how many of a bucket's gradients a rank has by then, and what becomes of them
  const own = flights.filter(f => f.on.includes(r)), got = grads[r].filter(g => g.z <= t).length;
  if (got < grads[r].length) return [got, "filling"];
  if (!own.length) return [got, "not sent"];
  return [got, own.every(f => f.z <= t) ? "averaged" : own.some(f => f.a <= t && t < f.z) ? "flying" : "waits"];
}

// # stage: for each rank a lane of gradients, one of all-reduces, and its buckets
function plan({ n, duration_s }, W, total_s) {
  const small = n > 4, left = W >= 560 ? 84 : 66, [back, drop, net, gap, box, under] = small ? [16, 6, 14, 5, 9, 11] : [30, 9, 18, 9, 14, 28];
  const each = back + drop + net + gap + box + under, y = 6 + n * each;
  return { W, H: y + 20, left, small, y, box, perTick: (W - left - 2) * duration_s / total_s / TICKS,
    at: range(n, r => ({ back: { y: 10 + r * each, h: back }, net: { y: 10 + r * each + back + drop, h: net }, box: 10 + (r + 1) * each - under - box })) };
}

function rowsOf({ ranks, flights, buckets }, { at, small }) {
  const block = ({ a, z, b }, ...lines) => ({ a, b: z, c: buckets[b].c, key: b, lines });
  const named = name => (small ? [] : name.split(".").map((_, i, all) => all.slice(i).join(".")).slice(0, name.includes(".") ? -1 : 1)); // "1.weight", not "weight"
  return ranks.flatMap(({ grads, exposed }, r) => [
    { ...at[r].back, blocks: [...grads.map(g => block(g, named(g.name), ["→ " + buckets[g.b].label, buckets[g.b].label])), ...exposed.map(([a, b]) => ({ a, b, c: "var(--p1)", key: -1, lines: [["exposed"]], kind: "lk-exposed" }))] },
    { ...at[r].net, blocks: flights.filter(f => f.on.includes(r)).map(f => block(f, ["all-reduce of " + buckets[f.b].name, buckets[f.b].name, buckets[f.b].label])) },
  ]);
}

function stageOf(parent, run, W, total_s, name) {
  const set = plan(run, W, total_s), ui = lanes(parent, { ...set, rows: rowsOf(run, set), name }), { rest } = ui;
  axis(ui, set, run.duration_s, total_s);
  const boxes = set.at.flatMap(({ back, net, box }, r) => {
    make("circle", rest, { cx: 5, cy: back.y + 8, r: 4, fill: color(r) });
    make("text.lk-rank", rest, { x: 14, y: back.y + 12.5 }, "rank " + r);
    for (const [text, y] of [["network", net.y + 13], ["buckets", box + set.box / 2 + 4], ["backward", back.y + 26]].slice(0, set.small ? 2 : 3)) make("text.lk-tiny", rest, { x: set.left - 8, y, "text-anchor": "end" }, text);
    for (const { b, a, on } of run.flights) { // from where a rank's bucket is full to where it leaves
      const { full, c } = run.buckets[b], d = `M${ui.x(full[r])} ${back.y + back.h}L${ui.x(a)} ${net.y}`;
      if (on.includes(r) && full[r] <= a) for (const layer of [rest, ui.move]) make("path.lk-drop", layer, { style: "--c:" + c, d });
    }
    return drawBuckets(rest, run, r, set);
  });
  const time = make("text.lk-rank", rest, { x: 0, y: set.y + 15 });
  return t => {
    ui.set(t);
    time.textContent = run.at(t);
    for (const paint of boxes) paint(t);
  };
}

function widths(sizes, room) { // to scale, but no less than a number needs
  const least = min(15, room / sizes.length), found = [];
  let all = sum(sizes);
  for (const i of [...sizes.keys()].sort((i, j) => sizes[i] - sizes[j])) {
    room -= found[i] = max(least, room * sizes[i] / all || 0);
    all -= sizes[i];
  }
  return found;
}

function drawBuckets(parent, { buckets }, r, { W, left, at, box, small }) { // returns what paints each
  const room = widths(buckets.map(bucket => bucket.sizes[r]), W - left - 2);
  let x = left;
  return buckets.map((bucket, i) => {
    const { name, label, grads, sizes } = bucket, all = bytes(sizes[r]), w = max(1, room[i] - 3), pad = w > 8 ? 2 : 0, perByte = (w - 2 * pad) / (sizes[r] || 1);
    const g = make("g", parent, { transform: `translate(${x},${at[r].box})`, style: "--c:" + bucket.c, role: "img", tabindex: r + i ? -1 : 0, "data-b": i, "data-rank": r });
    make("rect.lk-hit", g, { x: -1, y: -4, width: w + 2, height: box + (small ? 8 : 20) });
    const inner = make("g", g), text = small ? null : make("text", g, { x: 2, y: box + 12 });
    make("rect.lk-hull", inner, { width: w, height: box, rx: min(4, w / 3) });
    let from = pad, last;
    const fills = grads[r].map(({ size }) => {
      const width = size * perByte, fill = make("rect", inner, { x: from, y: pad, width: max(0.5, width - (width > 3)), height: box - 2 * pad });
      from += width;
      return fill;
    });
    x += room[i];
    return t => {
      const [got, state] = stateOf(bucket, r, t);
      if (last === (last = got + state)) return;
      fills.forEach((fill, i) => fill.setAttribute("class", "lk-fill" + (i < got ? " in" : "")));
      g.setAttribute("class", `lk-bucket ${state}${g.classList.contains("on") ? " on" : ""}`);
      const how = state === "filling" ? `${bytes(sum(grads[r].slice(0, got), x => x.size))} of ${all}` : `${all}, ${state}`;
      g.setAttribute("aria-label", `${name} of rank ${r}: ${how}`);
      if (text) text.textContent = fit([`${label}: ${how}`, `${label}: ${state === "filling" ? all : state}`, label], w + 1) ?? "";
    };
  });
}

// # words
const who = (list, n) => (list.length < 2 || list.length < n ? `rank${list.length > 1 ? "s" : ""} ${and(list)}` : n === 2 ? "both ranks" : `all ${n} ranks`);

function tell(run, t) { // what happens at a stop: [words to stress, the rest]
  const { n, buckets, ranks, flights } = run, parts = [], groups = {};
  if (t === 0) return ["", `Backward begins at the last layer. On each rank ${ranks[0].grads.length} gradients, ${bytes(run.size)}, go into ${run.num} bucket${run.num === 1 ? "" : "s"}.`];
  ranks.forEach(({ grads }, r) => grads.forEach(g => { if (g.z === t) (groups[g.name + (buckets[g.b].full[r] === t)] ??= []).push({ r, g }); }));
  const ready = Object.values(groups).map(group => ({ ...group[0], on: upper(who(group.map(one => one.r), n)) })), [first] = ready;
  for (const one of ready) parts.push((one === first ? "" : `${one.on}: ${one.g.name}`) + filled(run, buckets[one.g.b], one.r, t));
  for (const { b, z, on } of flights) if (z === t) parts.push(`${upper(buckets[b].name)} is averaged on ${who(on, n)}.`);
  for (const { b, a, on } of flights) if (a === t && !on.some(r => buckets[b].full[r] === t)) parts.push(`The all-reduce of ${buckets[b].name} starts.`);
  const over = range(n).filter(r => ranks[r].over === t);
  if (over.length) parts.push(`Backward is over${over.length < n ? " on " + who(over) : ""}.`);
  if (t === TICKS) parts.push(`Done after ${run.at(t)}${run.hidden ? `: ${run.hidden} of the communication was hidden` : ""}.`);
  return [first ? `${first.on}: the gradient of ${first.g.name} is ready` : "", parts.join(" ")];
}

function filled(run, bucket, r, t) { // what a gradient means for its bucket, and what becomes of that
  const { name, flights, full, grads, sizes } = bucket, next = flights.find(f => f.on.includes(r) && f.a >= t), all = bytes(sizes[r]);
  if (!bucket.known && !flights.length) return "; no all-reduce takes it.";
  if (full[r] > t) return `; ${name} has ${bytes(sum(grads[r].filter(g => g.z <= t), g => g.size))} of ${all}.`;
  const late = next?.on.filter(q => full[q] > t), busy = run.flights.find(f => f.on.includes(r) && f.a <= t && t < f.z);
  return `; ${name} is full: ${all}. ` + (!next ? "Nobody sends it." : next.a === t ? `Its all-reduce starts${next.on.some(q => run.ranks[q].over > t) ? " while backward goes on" : ""}.`
    : late.length ? `It waits for ${who(late)}, which ${late.length > 1 ? "are" : "is"} late.` : busy ? `It waits: ${run.buckets[busy.b].name} is on the network.` : "It is sent later.");
}

function figuresOf({ figures, num, programs, size, hidden }) { // one rank's all-reduces take no time
  const of = text => (hidden ? text : "–");
  return [[seconds(figures.step_s), "step: backward and all-reduces"], [of(seconds(figures.communication_s)), "of all-reduces"], [of(hidden), "of them hidden behind backward"],
    [of(seconds(figures.exposed_s)), programs.length > 1 ? "exposed on the slowest rank" : "exposed, nothing hides it"], ["" + num, `buckets, ${bytes(size)} on each rank`]];
}

function tellBucket(detail, { name, full, flights, sizes, grads, c, label }, { at }) {
  const r = max(0, grads.findIndex(list => list.length)), known = full.filter(t => t >= 0), times = new Set([min(...known), max(...known)].map(at));
  const sent = new Set(flights.map(({ a, z, size }) => `, all-reduced from ${at(a)} to ${at(z)}${size === sizes[r] ? "" : " as " + bytes(size)}`)), line = make("p"), list = make("ul");
  make("i", line, { style: "--c:" + c }, label);
  line.append(" ");
  make("b", line, {}, upper(name));
  line.append(`: ${bytes(sizes[r])}${known.length ? `, ${flights.length ? "full" : "complete"} after ${[...times].join(" to ")}` : ""}`, ...sent);
  for (const g of grads[r]) make("li", list, {}, `${g.name} ${bytes(g.size)}`);
  detail.replaceChildren(line, list);
}

// # widget
function mountTimeline(el, data, opts) {
  const total_s = max(...data.runs.map(run => run.duration_s)), decoded = {};
  const state = { t: 0, speed: 1, playing: false, stops: () => run.stops, wait: () => false, rate: step => max(TICKS / 10, (step || 0) / 0.7) };
  let run, paint, said, told, picked = null;
  const ui = shell(el, data, state, { build, draw, turn: by => turn(by) }), { root, field, caption } = ui, foot = footer(root, 5);
  const detail = make("div.lk-detail lk-listing lk-small", root);
  const which = choices(ui.more, data, choose);

  function choose() { // the clock goes on from where it is, and an end stays an end
    const now_s = state.t === TICKS ? Infinity : state.t * (run?.duration_s ?? 0);
    run = decoded[which()] ??= decode(data, data.runs[which()]);
    ui.control.halt();
    state.t = min(TICKS, now_s / run.duration_s);
    picked = null;
    ui.source.textContent = run.source;
    ui.scrub.build(run.over < TICKS ? [0, run.over, TICKS] : [0, TICKS], "01", { snap: false, steps: run.stops.length - 1 });
    foot(figuresOf(run));
    ui.rebuild();
  }
  function build() {
    field.replaceChildren();
    paint = stageOf(field, run, ui.width || 320, total_s, data.title);
    const longest = run.stops.map(t => tell(run, t)).sort((a, b) => b.join("").length - a.join("").length).slice(0, 4);
    caption.style.minHeight = ""; // room for the longest caption, so that nothing below it moves
    caption.style.minHeight = max(...longest.map(text => { write(text); return caption.clientHeight; })) + "px";
    said = told = null;
  }
  function write([stress, rest]) { caption.replaceChildren(make("b", null, {}, stress), rest); }
  function draw() {
    if (!paint) return;
    const { t, playing } = state, k = run.stops.findLastIndex(s => s <= t), { grads } = run.ranks[0];
    const shown = picked ?? (grads.find(g => g.z > t) ?? run.flights.find(f => f.z > t) ?? grads.at(-1)).b;
    paint(t);
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (said = k)) write(tell(run, run.stops[k]));
    if (told !== (told = shown)) tellBucket(detail, run.buckets[shown], run);
    ui.scrub.set(t, k, `${run.at(t)} of ${run.at(TICKS)}`, -1);
    ui.control.paint();
    Object.assign(root.dataset, { step: k, steps: run.stops.length - 1, playing, ranks: run.n, bucket: shown });
    opts.onChange?.({ step: k, playing });
  }
  function show(b) { // a bucket that is pointed at or has focus; null: the one under way
    if (b !== picked) { picked = b; mark(); draw(); }
  }
  function mark() {
    for (const g of field.querySelectorAll("[data-b]")) g.classList.toggle("on", +g.dataset.b === picked);
    if (picked !== null) for (const g of field.querySelectorAll("[tabindex]")) g.setAttribute("tabindex", g.dataset.rank + g.dataset.b === "0" + picked ? 0 : -1);
  }
  const bucketAt = e => { const b = e.target.closest("[data-b]")?.dataset.b ?? -1; return b < 0 ? null : +b; };
  const turn = by => field.querySelector(`[data-rank="0"][data-b="${clamp((picked ?? (by > 0 ? -1 : run.buckets.length)) + by, run.buckets.length - 1)}"]`).focus();
  field.onpointerover = e => show(bucketAt(e));
  field.onpointerleave = () => show(null);
  field.addEventListener("focusin", e => show(bucketAt(e)));
  field.addEventListener("focusout", () => show(null));
  choose();
  return { ...ui, state };
}

define("timeline", () => mountTimeline);
})();
