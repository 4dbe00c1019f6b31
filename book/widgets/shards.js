/* Lockstep's sharded product: which rank holds which block of which matrix, what its sums contain and what moves.
   shards_data.py says what the data mean; nothing is drawn that they don't say. */
(() => {
const { EPS, range, clamp, make, canvas, color, and, bytes, choices, footer, shell, define } = globalThis.lockstepControls;
const { min, max, abs, floor, ceil } = Math, NONE = "var(--p0)";

// # data: what each rank has before the first step and after each, by matrix and number of block
function decode(raw) {
  const put = (held, blocks) => {
    const next = held.map(rank => rank.map(blocks => [...blocks])); // what is undefined, the rank does not have
    for (const [rank, m, number, contents] of blocks) next[rank][m][number] = contents;
    return next;
  };
  const states = [put(range(raw.n, () => raw.matrices.map(() => [])), raw.start)];
  for (const step of raw.steps) states.push(put(states.at(-1), step[4]));
  const told = [["", raw.begin, false], ...raw.steps.map(([, stress, rest, wrong]) => [stress, rest, wrong])];
  const lines = 1 + max(...raw.matrices.map(m => m.line)), cells = [];
  for (let r = 0; r < raw.n; r++) for (let line = 0; line < lines; line++) raw.slots.forEach((_, slot) => cells.push({ r, line, slot, i: cells.length,
    all: raw.matrices.flatMap((m, k) => (m.slot === slot && m.line === line ? [k] : [])) }));
  return { ...raw, S: raw.steps.length, states, told, lines, cells: cells.filter(cell => cell.all.length).map((cell, i) => ({ ...cell, i })) };
}

const has = blocks => blocks.some(held => held !== undefined);
const shown = (run, state, cell) => cell.all.findLast(m => has(state[cell.r][m])) ?? cell.all[0]; // what came last takes the place

function span({ grid: [down, across], shape: [height, width] }, blocks) { // [first row, last, first column, last] of what is held
  const numbers = range(down * across).filter(k => blocks[k] !== undefined), rows = numbers.map(k => floor(k / across)), columns = numbers.map(k => k % across);
  const edge = (list, parts, size) => [min(...list) * size / parts, (max(...list) + 1) * size / parts];
  return [...edge(rows, down, height), ...edge(columns, across, width)];
}

function sums(m, blocks) { // what the blocks of a place contain; odd: of some part not once or never
  const held = blocks.filter(h => h !== undefined), n = m.lanes;
  if (!held.length || held.includes(null)) return { unknown: held.length > 0 };
  const lanes = held.flatMap(h => h.slice(0, n)), parts = range(n).filter(i => held.every(h => h[i])), odd = lanes.filter(x => x && x !== 1).reduce((a, b) => (abs(b) > abs(a) ? b : a), 0);
  return { parts, odd: +odd.toFixed(2), done: parts.length === n && !odd, bias: m.bias ? +max(...held.map(h => h[n])).toFixed(2) : 0 };
}

function count(m, blocks) { // in short: [text, whether it is bad, whether it is complete]
  const { unknown, parts, odd, done, bias } = sums(m, blocks);
  if (!parts) return [unknown ? "?" : "", unknown, false];
  const text = [odd ? "×" + odd : m.lanes > 1 ? `${parts.length}/${m.lanes}` : "", bias ? (bias === 1 ? "b" : bias + "b") : ""].filter(Boolean).join(" + ");
  return [text, !!odd || bias > 1, done];
}

// # blocks
const rect = (box, rest) => "<rect " + ["x", "y", "width", "height"].map((name, i) => `${name}="${box[i].toFixed(1)}" `).join("") + rest + "/>";

function fill(m, k, contents, w, h, extra = "") { // one block: a bar for each part of its sum, hollow where missing, hatched where double
  const [down, across] = m.grid, tw = w / across, th = h / down, x = k % across * tw, y = floor(k / across) * th;
  if (contents === null) return rect([x + 3, y + 3, tw - 6, th - 6], `class="lk-blank"`);
  const pad = 2, bw = (tw - 2 * pad) / contents.length, own = m.paint === "row" ? floor(k / across) : k % across;
  return contents.map((c, i) => {
    if (!(c > 0)) return "";
    const tall = min(1, c) * (th - 2 * pad), box = [x + pad + i * bw + 0.5, y + th - pad - tall, max(1, bw - 1), tall];
    const c0 = i >= m.lanes ? "var(--p2)" : m.lanes > 1 ? color(i) : m.paint ? color(own) : NONE;
    return rect(box, `rx="1.5" fill="${c0}" ${extra}`) + (c > 1 ? `<path d="M${box[0] + box[2] / 2} ${box[1]}v${tall}" stroke-width="${box[2]}" class="lk-hatch"/>` : "");
  }).join("");
}
const fills = (m, blocks, ...rest) => range(m.grid[0] * m.grid[1]).map(k => (blocks[k] === undefined ? "" : fill(m, k, blocks[k], ...rest))).join("");

// # stage: a row of matrices for each rank, the gradients below them
function plan({ n, slots, lines }, W) {
  const wide = W >= 560, left = wide ? 74 : 0, top = 34, S = slots.length, gap = wide ? 34 : 15, head = wide ? 0 : 20;
  const w = floor(min(S > 3 ? 132 : 180, (W - left - gap * (S - 1) - 12) / S)), h = n > 2 || lines > 1 ? 42 : 58, under = 18, each = head + lines * (h + under) + (n > 2 ? 8 : 14);
  const place = ({ r, line, slot }) => [left + slot * (w + gap) + 1, top + r * each + head + line * (h + under)];
  return { W, H: top + n * each, wide, left, top, gap, head, w, h, each, place };
}

function stageOf(parent, run, W, name) {
  const set = plan(run, W), { w, h, gap, place } = set, { rest, move } = canvas(parent, W, set.H, { role: "group", "aria-label": name });
  const base = slot => run.matrices.filter(m => m.line === 0 && m.slot === slot).at(-1);
  run.slots.forEach((slot, i) => {
    const { recipe, shape } = base(i), [x] = place({ r: 0, line: 0, slot: i });
    make("text.lk-rank", rest, { x: x + w / 2, y: 12, "text-anchor": "middle" }, slot);
    make("text.lk-tiny", rest, { x: x + w / 2, y: 26, "text-anchor": "middle" }, recipe ? "= " + recipe : shape.join("×"));
  });
  const painters = run.cells.map(cell => drawCell(rest, run, cell, set));
  for (let r = 0; r < run.n; r++) {
    const [x, y] = place({ r, line: 0, slot: 0 }), ty = set.wide ? y + h / 2 + 4 : y - 8;
    make("circle", rest, { cx: 5, cy: ty - 4.5, r: 4, fill: color(r) });
    make("text.lk-rank", rest, { x: 14, y: ty }, "rank " + r);
    run.slots.slice(1).forEach((_, i) => make("text", rest, { x: place({ r, line: 0, slot: i + 1 })[0] - gap / 2, y: y + h / 2 + 5, "text-anchor": "middle", style: `font-size:${set.wide ? 18 : 14}px` }, base(i + 1).recipe ? "=" : "·"));
  }
  const wires = make("g", rest);
  let under = null, ghosts = [];
  return t => {
    const k = ceil(t - EPS), f = t - k + 1, step = run.steps[k - 1], together = step?.[5].length > 0, done = !step || f >= 1 - EPS || (!together && f > 0.5) ? k : k - 1;
    for (const paint of painters) paint(run.states[done], step?.[6] ?? []);
    if (under !== k) {
      under = k;
      wires.replaceChildren();
      move.replaceChildren();
      ghosts = together ? ghostsOf(run, k, set, move) : [];
      if (together) for (const m of new Set(step[5].map(([m]) => m))) wire(wires, run.matrices[m], run.n, set);
    }
    const flying = f < 1 - EPS && f > EPS, u = f < 0.5 ? 2 * f * f : 1 - 2 * (1 - f) ** 2;
    move.style.visibility = flying ? "" : "hidden";
    for (const { g, x, from, to } of ghosts) g.setAttribute("transform", `translate(${x},${(from + (to - from) * u).toFixed(1)})`);
  };
}

function wire(parent, m, n, { w, h, place }) { // which ranks' blocks meet
  const ys = range(n, r => place({ r, line: m.line, slot: m.slot })[1] + h / 2), x = place({ r: 0, line: m.line, slot: m.slot })[0] + w;
  make("path.lk-wire", parent, { d: `M${x + 7} ${ys[0]}V${ys.at(-1)}` + ys.map(y => `M${x + 1} ${y}h6`).join("") });
}

function ghostsOf(run, k, { w, h, place }, parent) {
  return run.steps[k - 1][5].map(([i, src, dst, numbers]) => {
    const m = run.matrices[i], own = run.states[k - 1][src][i], g = make("g", parent), at = r => place({ r, line: m.line, slot: m.slot });
    g.innerHTML = numbers.map(b => fill(m, b, own[b], w, h, 'class="lk-ghost"')).join("");
    return { g, x: at(src)[0], from: at(src)[1], to: at(dst)[1] };
  });
}

function drawCell(parent, run, cell, { w, h, place }) { // returns what paints it
  const [x, y] = place(cell), g = make("g.lk-cell", parent, { transform: `translate(${x},${y})`, role: "img", tabindex: cell.i ? -1 : 0, "data-i": cell.i });
  make("rect.lk-hull", g, { width: w, height: h, rx: 4 });
  const inner = make("g", g), text = make("text.lk-tiny", g, { x: w / 2, y: h + 12.5, "text-anchor": "middle" });
  let last, mark;
  return (state, busy) => {
    const i = shown(run, state, cell), m = run.matrices[i], blocks = state[cell.r][i], now = busy.some(b => cell.all.includes(b));
    if (mark !== (mark = now)) g.classList.toggle("busy", now);
    if (last === (last = blocks)) return;
    inner.innerHTML = fills(m, blocks, w, h);
    const [sum, bad, done] = count(m, blocks), name = m.line || run.slots[m.slot] !== m.name ? m.name + " " : "";
    const [top, bottom, a, z] = has(blocks) ? span(m, blocks) : [], size = has(blocks) ? `${bottom - top}×${z - a}` : "", what = sum && m.lanes > 1 ? sum + (/\d\/\d$/.test(sum) ? " terms" : "") : [size, sum].filter(Boolean).join(" ");
    text.textContent = [name + what, name + (sum || size), sum || size].find(s => s.length * 6 <= w + 12) ?? "";
    text.setAttribute("class", "lk-tiny" + (bad ? " bad" : done && m.lanes > 1 ? " done" : ""));
    g.setAttribute("aria-label", tell(run, cell, state).join(""));
  };
}

// # words
function tell(run, cell, state) { // [name, the rest] of what a rank has in a place
  const i = shown(run, state, cell), m = run.matrices[i], blocks = state[cell.r][i], name = `${m.name} on rank ${cell.r}`;
  if (!has(blocks)) return [name, ": nothing yet."];
  const [top, bottom, a, z] = span(m, blocks), part = (x, y, size, what) => (y - x === size ? `all ${size} ${what}` : `${what} ${x} to ${y - 1}`);
  const { unknown, parts, odd, done, bias } = sums(m, blocks), n = m.lanes, terms = odd ? `; counted ×${odd}` : n === 1 ? "" : done ? `; all ${n} terms` : `; ${parts.length} of ${n} terms${parts.length ? `, of part${parts.length > 1 ? "s" : ""} ` + and(parts) : ""}`;
  const why = unknown ? `; not made of blocks of ${m.name}` : terms + (!m.bias ? "" : bias ? `, the bias${bias > 1 ? " ×" + bias : ""}` : ", no bias");
  return [name, `${m.recipe && " = " + m.recipe}: ${part(top, bottom, m.shape[0], "rows")}, ${part(a, z, m.shape[1], "columns")} of ${m.shape.join("×")}, ${bytes((bottom - top) * (z - a) * run.item)}${why}.`];
}

// # widget
function mountShards(el, data, opts) {
  const decoded = {}, state = { t: 0, speed: 1, playing: false, stops: () => range(run.S + 1), wait: () => false, rate: step => (step ? 1.4 : 0.6) };
  let run, paint, said, picked = null;
  const ui = shell(el, data, state, { build, draw, turn: by => turn(by) }), { root, field, caption } = ui, foot = footer(root, 5), detail = make("div.lk-detail lk-small", root);
  const which = choices(ui.more, data, choose);

  function choose() { // from the start; an end stays an end
    const over = run && state.t === run.S;
    run = decoded[which()] ??= decode(data.runs[which()]);
    ui.control.halt();
    state.t = over ? run.S : 0;
    picked = null;
    ui.source.textContent = run.source;
    ui.scrub.build(range(run.S + 1), run.steps.map(([kind]) => ({ collective: 1, message: 1, return: 2, gradient: 2, backward: 2 })[kind] ?? 0).join(""));
    foot(run.figures.map(pair => pair.map(text => text.replaceAll(" = ", "\u00a0=\u00a0").replaceAll(" kB", "\u00a0kB")))); // these stay on one line
    ui.rebuild();
  }
  function build() {
    field.replaceChildren();
    paint = stageOf(field, run, ui.width || 320, data.title);
    caption.style.minHeight = ""; // room for the longest caption, so that nothing below it moves
    caption.style.minHeight = max(...run.told.map(text => { write(text); return caption.clientHeight; })) + "px";
    said = null;
  }
  function write([stress, rest, wrong]) { caption.replaceChildren(make("b", null, wrong ? { class: "lk-wrong" } : {}, stress), rest); }
  function draw() {
    if (!paint) return;
    const { t, playing } = state, k = clamp(ceil(t - EPS), run.S), now = clamp(floor(t + EPS), run.S);
    paint(t);
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (said = k)) write(run.told[k]);
    const busy = run.steps[k - 1]?.[6] ?? [0], cell = picked ?? run.cells.findIndex(c => c.r === 0 && c.all.includes(busy.at(-1))), [name, rest] = tell(run, run.cells[max(0, cell)], run.states[now]);
    if (detail.textContent !== name + rest) detail.replaceChildren(make("b", null, {}, name), rest);
    ui.scrub.set(t, now, run.told[now].slice(0, 2).join(""), k - 1);
    ui.control.paint();
    Object.assign(root.dataset, { step: now, steps: run.S, playing, ranks: run.n });
    opts.onChange?.({ step: now, playing });
  }
  function show(i) { // a place that is pointed at or has focus; null: the one that the step works on
    if (i === picked) return;
    picked = i;
    for (const g of field.querySelectorAll(".lk-cell")) { g.classList.toggle("on", +g.dataset.i === i); if (i !== null) g.setAttribute("tabindex", +g.dataset.i === i ? 0 : -1); }
    draw();
  }
  const cellAt = e => { const i = e.target.closest(".lk-cell")?.dataset.i; return i === undefined ? null : +i; };
  const turn = by => field.querySelector(`[data-i="${clamp((picked ?? (by > 0 ? -1 : run.cells.length)) + by, run.cells.length - 1)}"]`).focus();
  field.onpointerover = e => show(cellAt(e));
  field.onpointerleave = () => show(null);
  field.addEventListener("focusin", e => show(cellAt(e)));
  field.addEventListener("focusout", () => show(null));
  choose();
  return { ...ui, state };
}

define("shards", () => mountShards);
})();
