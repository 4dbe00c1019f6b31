/* Lockstep's memory player: what each rank holds of each unit of a model, and what moves. memory_page.py says what the
   data mean; nothing is drawn that they don't say. */
(() => {
const { EPS, range, clamp, make, canvas, color, bytes, choices, footer, shell, define } = globalThis.lockstepControls;
const { min, max, ceil, floor } = Math, LANES = 3, NAMES = ["parameters", "gradients", "optimizer state", "activations"];

// # data: [bytes, look] by lane and unit, before the first step and after each
function decode(raw, texts) {
  const put = (held, changes) => {
    const next = held.map(lane => [...lane]);
    for (const [lane, unit, size, look] of changes) next[lane][unit] = [size, look];
    return next;
  };
  const states = [put(NAMES.map(() => raw.units.map(() => [0, ""])), raw.start)], sent = [0];
  for (const step of raw.steps) { states.push(put(states.at(-1), step[5])); sent.push(sent.at(-1) + step[4]); }
  const told = [raw.begin, ...raw.steps.map(step => step.slice(2, 4))].map(said => said.map(i => texts[i]));
  return { ...raw, S: raw.steps.length, states, sent, told, sums: states.map(state => state.map(lane => lane.reduce((sum, [size]) => sum + size, 0))) };
}

const phases = steps => { // forward, backward, update
  const at = kind => { const k = steps.findIndex(([op]) => op === kind); return k < 0 ? steps.length : k; }, first = at("backward"), last = at("update");
  return steps.map((_, k) => (k >= last ? 2 : k >= first ? 1 : 0)).join("");
};

// # layout: for each rank a strip of units, of which each has a lane for each kind of state, and below it a bar to scale
function plan({ n, units }, W, room) {
  const wide = W >= 560, left = wide ? 74 : 64, gap = wide ? 6 : 4, U = units.length, avail = W - left - gap * (U - 1) - 2, least = min(34, avail / U * 0.8);
  const all = units.reduce((sum, [, size]) => sum + size, 0), lane = n > 4 ? 6 : 8, bar = 17, top = 22, each = LANES * (lane + 2) + bar + (n > 4 ? 15 : 21);
  let x = left + 1;
  const cells = units.map(([, size]) => { const w = least + (avail - U * least) * size / all, cell = { x, w }; x += w + gap; return cell; });
  const scale = (W - left - 2 - 4 * (room.filter(Boolean).length - 1)) / room.reduce((a, b) => a + b, 0);
  let bx = left + 1;
  const sections = room.map(size => { const s = { x: bx, w: size * scale }; bx += s.w + (size && 4); return s; });
  return { wide, W, H: top + n * each - 6, left, lane, bar, top, each, cells, sections, scale, y: (r, l) => top + r * each + l * (lane + 2), under: LANES * (lane + 2) + 4 };
}

const rect = (x, y, w, h, rest) => `<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${max(0.8, w).toFixed(1)}" height="${h}" ${rest}/>`;
const piece = ({ x, w }, j, n, y, h, c, pale) => rect(x + w * j / n + 0.4, y, w / n - 0.8, h, `rx="1" fill="${color(c)}"${pale ? ' class="lk-pale"' : ""}`);

function fill(run, r, l, u, [size, look], { cells, lane, y }) { // what a rank holds of a unit
  const { n } = run, whole = run.units[u][1], at = y(r, l), cell = cells[u];
  if (look === "l") return rect(cell.x, at, cell.w * min(1, size / whole), lane, `rx="1" fill="${color(r)}" class="lk-pale"`);
  return range(n).map(j => (j === r || look === "w" || look === "o" ? (look ? piece(cell, j, n, at, lane, j, look === "o" && j !== r) : "") : "")).join("");
}

function bars(run, k, r, { wide, sections, scale, top, each, under, bar }) { // the same bytes, kind by kind and to scale
  const y = top + r * each + under;
  return sections.map(({ x, w }, l) => {
    const size = run.sums[k][l], held = size * scale, text = size ? bytes(size) : "", room = text.length * 6.2 + (wide ? 6 : 0), h = wide ? bar : 5;
    if (w < 1) return "";
    const inside = wide && held >= room, beside = wide ? w - held >= room : w >= room, tx = inside ? x + held / 2 : wide ? x + held + 5 : x; // on a phone below it
    const words = inside || beside ? `<text x="${tx.toFixed(1)}" y="${wide ? y + 12.5 : y + 16}" class="${inside ? "lk-in" : "lk-out"}" text-anchor="${inside ? "middle" : "start"}">${text}</text>` : "";
    return rect(x, y, w, h, 'class="lk-whole" rx="2"') + (size ? rect(x, y, held, h, `class="lk-hold" rx="2" fill="var(--m${l})"`) : "") + words;
  }).join("");
}

function stageOf(parent, run, W, room, name) {
  const set = plan(run, W, room), { rest, move } = canvas(parent, W, set.H, { "aria-label": name }), { cells, y, lane, top, each } = set;
  const heads = run.units.map(([unit], u) => { const short = unit.replace(/^\D+ (?=\d+$)/, ""), fits = text => text.length * 6 <= cells[u].w + 3; return make("text.lk-tiny", rest, { x: cells[u].x + cells[u].w / 2, y: 12, "text-anchor": "middle" }, fits(unit) ? unit : fits(short) ? short : ""); });
  const totals = range(run.n, r => {
    const ty = top + r * each + 11;
    make("circle", rest, { cx: 5, cy: ty - 4.5, r: 4, fill: color(r) });
    make("text.lk-rank", rest, { x: 14, y: ty }, "rank " + r);
    for (let l = 0; l < LANES; l++) for (const { x, w } of cells) make("rect.lk-slot", rest, { x, y: y(r, l), width: w, height: lane, rx: 1 });
    return make("text", rest, { x: 14, y: top + r * each + set.under + 12.5 });
  });
  const held = make("g", rest), ring = make("g", rest);
  let painted, under, ghosts = [];
  return t => {
    const k = ceil(t - EPS), f = t - k + 1, step = run.steps[k - 1], moves = !!step?.[4], done = !step || f >= 1 - EPS || (!moves && f > 0.4) ? k : k - 1;
    if (painted !== (painted = done)) {
      const state = run.states[done], sum = run.sums[done].reduce((a, b) => a + b, 0);
      held.innerHTML = range(run.n, r => range(LANES, l => state[l].map((cell, u) => fill(run, r, l, u, cell, set)).join("")).join("") + bars(run, done, r, set)).join("");
      for (const text of totals) text.textContent = bytes(sum);
    }
    if (under !== (under = k)) {
      const on = step ? (step[1] < 0 ? range(cells.length) : [step[1]]) : [];
      heads.forEach((text, u) => text.classList.toggle("lk-on", on.includes(u)));
      ring.innerHTML = on.map(u => range(run.n, r => rect(cells[u].x - 2, y(r, 0) - 2.5, cells[u].w + 4, LANES * (lane + 2) + 3, 'class="lk-ring" rx="4"')).join("")).join("");
      move.replaceChildren();
      ghosts = moves ? ghostsOf(run, step, set, move) : [];
    }
    const flying = f < 1 - EPS && f > EPS && moves;
    move.style.visibility = flying ? "" : "hidden";
    if (flying) for (const ghost of ghosts) ghost(f);
    return done;
  };
}

function ghostsOf(run, [op, u], { cells, y, lane }, parent) { // piece j from rank a to rank b, between two parts of the step
  const { n } = run, l = op === "all_gather" ? 0 : 1, half = op === "all_reduce" ? 0.5 : 1, pairs = range(n, j => range(n).filter(r => r !== j).map(r => [j, r])).flat();
  const fly = (j, a, b, from, to, pale) => {
    const g = make("g", parent);
    g.innerHTML = piece(cells[u], j, n, 0, lane, pale ? a : j, false);
    return f => {
      const v = clamp((f - from) / (to - from)), ease = v < 0.5 ? 2 * v * v : 1 - 2 * (1 - v) ** 2;
      g.setAttribute("transform", `translate(0,${(y(a, l) + (y(b, l) - y(a, l)) * ease).toFixed(1)})`);
      g.setAttribute("visibility", v > 0 && v < 1 ? "inherit" : "hidden");
    };
  };
  const add = op === "all_gather" ? [] : pairs.map(([j, r]) => fly(j, r, j, 0, half, true)); // all pieces j meet on rank j
  const spread = op === "reduce_scatter" ? [] : pairs.map(([j, r]) => fly(j, j, r, 1 - half, 1)); // and go to all from there
  return [...add, ...spread];
}

function key(parent, room) {
  const box = make("div.lk-parts lk-small", parent), entry = (text, attrs) => { const span = make("span", box); if (attrs) make("i", span, attrs); span.append(text); };
  entry("Each unit, from the top: parameters, gradients, optimizer state, in the colour of the rank whose shard it is.");
  entry("held by another rank", { class: "none" });
  entry("own part of the batch only, or not yet updated", { class: "pale", style: "--c:var(--r0)" });
  entry("To scale:");
  NAMES.forEach((name, l) => room[l] && entry(name, { style: `--c:var(--m${l})` }));
}

// # widget
function mountMemory(el, data, opts) {
  const decoded = {}, state = { t: 0, speed: 1, playing: false, stops: () => range(run.S + 1), wait: () => false, rate: step => (step ? 1.4 : 1.1) };
  let run, paint, said;
  const ui = shell(el, data, state, { build, draw, turn() {} }), { root, field, caption } = ui, foot = footer(root, 5), which = choices(ui.more, data, choose);
  key(root.insertBefore(make("div"), root.querySelector(".lk-bar")), data.room);

  function choose() { // another run, from the same share of its step
    const share = run ? state.t / run.S : 0;
    run = decoded[which()] ??= decode(data.runs[which()], data.texts);
    ui.control.halt();
    state.t = share === 1 ? run.S : floor(share * run.S + EPS);
    ui.source.textContent = run.source;
    ui.scrub.build(range(run.S + 1), phases(run.steps));
    ui.rebuild();
  }
  function build() {
    field.replaceChildren();
    paint = stageOf(field, run, ui.width || 320, data.room, data.title);
    caption.style.minHeight = ""; // room for the longest caption, so that nothing below it moves
    caption.style.minHeight = max(...run.told.map(text => { write(text); return caption.clientHeight; })) + "px";
    said = null;
  }
  function write([stress, rest]) { caption.replaceChildren(make("b", null, {}, stress), rest); }
  function draw() {
    if (!paint) return;
    const { t, playing } = state, k = clamp(ceil(t - EPS), run.S), now = clamp(floor(t + EPS), run.S);
    const shown = paint(t);
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (said = k)) write(run.told[k]);
    const live = [bytes(run.sums[shown].reduce((a, b) => a + b, 0)),,, bytes(run.sent[shown])];
    foot(run.figures.map(([value, meaning], i) => [(value || live[i]).replace(" ", "\u00a0"), meaning]));
    ui.scrub.set(t, now, run.told[now].join(""), k - 1);
    ui.control.paint();
    Object.assign(root.dataset, { step: now, steps: run.S, playing, ranks: run.n });
    opts.onChange?.({ step: now, playing });
  }
  choose();
  return { ...ui, state };
}

define("memory", () => mountMemory);
})();
