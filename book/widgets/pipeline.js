/* Lockstep's pipeline player: the forwards and backwards of every rank on one clock, what each rank keeps meanwhile, and
   what travels between stages; one run, or several under one another. pipeline.py says what the data mean. */
(() => {
const { range, clamp, make, color, and, seconds, choices, footer, shell, define } = globalThis.lockstepControls, { TICKS, fit, lanes, axis } = globalThis.lockstepLanes;
const { min, max, abs, sign } = Math, NEAR = 0.01, RESULT = { F: "output", B: "gradient", I: "gradient" };
const KINDS = { F: ["forward", "forwards"], B: ["backward", "backwards"], I: ["input gradient", "input gradients"], W: ["weight gradient", "weight gradients"] };
const near = (a, b) => abs(a - b) < NEAR, due = (a, t) => a < t + NEAR, upper = text => text[0].toUpperCase() + text.slice(1);
const num = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`, who = list => `rank${list.length > 1 ? "s" : ""} ${and(list)}`, short = s => seconds(s).replace(/(\.\d*[1-9])0+ |\.0+ /, "$1 ");

// # data
function decode(raw) {
  const per = TICKS / raw.ticks;
  return planned({ ...raw, ranks: raw.order.map((text, r) => {
    const gaps = new Map(raw.idle[r]), late = new Map(raw.late?.[r].map(([i, ...how]) => [i, how]));
    let z = 0;
    return (text ? text.split(",") : []).map((word, i) => {
      const [, s, kind, m] = word.match(/(\d+)(\D)(\d+)/), a = z + (gaps.get(i) ?? 0);
      z = a + (raw.len[r][i] ?? raw.len[r][kind]);
      const [wait, length] = late.get(i) ?? [0, raw.wire ?? 0];
      return { r, s: +s, kind, m: +m, a: a * per, z: z * per, out: (z + wait) * per, there: (z + wait + length) * per };
    });
  }) });
}

function planned(run) { // what follows from the actions: messages, stops, what is kept when
  const { ranks, stages } = run, home = [], acts = ranks.flat();
  stages.forEach((list, r) => list.forEach(s => { home[s] = r; }));
  const moves = acts.filter(x => RESULT[x.kind]).map(x => ({ x, to: home[x.s + (x.kind === "F" ? 1 : -1)] ?? x.r, a: x.out, z: x.there })).filter(({ x, to }) => to !== x.r);
  const stops = [0, TICKS, ...acts.flatMap(x => [x.a, x.z])].sort((a, b) => a - b).filter((s, i, all) => !i || !near(s, all[i - 1]));
  const peak = ranks.map(own => max(0, ...own.map(x => kept(own, x.z).length)));
  return { ...run, home, acts, moves, stops, peak, several: stages.some(list => list.length > 1), hop: 0.6 * min(...acts.map(x => x.z - x.a).filter(d => d > 0)), at: t => (t > NEAR ? short(t / TICKS * run.step_s) : "0 s") };
}

function kept(own, t) { // the forwards of a rank that wait for their backward
  const list = [];
  for (const x of own) {
    if (!due(x.z, t)) break;
    if (x.kind === "F") list.push(x);
    else if (x.kind !== "I") list.splice(list.findIndex(f => f.s === x.s && f.m === x.m), 1);
  }
  return list;
}
const idle = (own, t) => t - own.reduce((busy, x) => busy + max(0, min(t, x.z) - x.a) * (x.a < t), 0);

// # stage: for each rank a lane of its actions, and a strip of what it keeps
function plan({ n, step_s }, W, total_s, tight) {
  const small = tight || n > 4, left = W < 560 ? 66 : tight ? 108 : 84, [lane, strip, gap] = tight ? [16, 0, 4] : small ? [20, 12, 13] : [30, 14, 22];
  const each = lane + strip + gap, y = 6 + n * each;
  return { W, H: y + 20, left, small, tight, y, lane, strip, top: r => 10 + r * each, perTick: (W - left - 2) * step_s / total_s / TICKS };
}

function blocksOf(own, stages, several) {
  return own.map(({ a, z, kind, m, s }) => ({ a, b: z, c: `var(--k${kind})`, key: m, look: "k" + kind, marks: stages.indexOf(s), pad: 2, lines: [[...(several ? [`${kind}${m} of ${s}`] : []), kind + m, "" + m]] }));
}

function stageOf(parent, run, W, total_s, name, tight) { // returns what paints a moment, and what marks a micro-batch
  const set = plan(run, W, total_s, tight), { left, lane, top, small } = set, { ranks, stages, several } = run;
  const ui = lanes(parent, { ...set, name, rows: ranks.map((own, r) => ({ y: top(r), h: lane, blocks: blocksOf(own, stages[r], several) })) }), { rest } = ui;
  axis(ui, set, run.step_s, total_s);
  const trail = make("path.lk-trail", rest), strips = ranks.map((_, r) => {
    const text = (words, y, spec = "text.lk-tiny", x = 14) => make(spec, rest, { x, y }, words), of = num(stages[r].length, "stage").slice(2) + " " + stages[r].join(", ");
    make("circle", rest, { cx: 5, cy: top(r) + lane / 2 - (small ? 0 : 6), r: 4, fill: color(r) });
    text((tight && W < 560 ? "" : "rank ") + r, top(r) + lane / 2 + (small ? 4.5 : -1.5), "text.lk-rank");
    if (!small) text(fit([of, stages[r].join(", ")], left - 12) ?? "", top(r) + lane / 2 + 12);
    if (tight) return tally(rest, run, r, set);
    text(small ? fit([of, stages[r].join(", ")], left - 12) ?? "" : "holds", top(r) + lane + 6 + set.strip / 2 + (small ? 1 : 4));
    return stripOf(rest, run, r, set);
  });
  const travel = tight ? () => {} : chips(ui, run, set), now = tight ? make("text.lk-tiny", rest, { x: left - 8, y: set.y + 15, "text-anchor": "end" }, "in flight") : make("text.lk-rank", rest, { x: 0, y: set.y + 15 });
  return { paint(t) {
    ui.set(t);
    if (!tight) now.textContent = run.at(t);
    for (const paint of strips) paint(t);
    travel(t);
  }, mark(m) {
    for (const g of parent.querySelectorAll("[data-b]")) g.classList.toggle("on", +g.dataset.b === m);
    const own = run.acts.filter(x => x.m === m && x.kind !== "W").sort((x, y) => x.a - y.a);
    trail.setAttribute("d", own.slice(1).map((x, i) => `M${ui.x(own[i].z)} ${top(own[i].r) + lane / 2}L${ui.x(x.a)} ${top(x.r) + lane / 2}`).join(""));
  } };
}

function tally(parent, { ranks, peak }, r, { left, top, lane }) { // how many forwards a rank keeps, as a number
  const text = make("text", parent, { x: left - 8, y: top(r) + lane / 2 + 4, "text-anchor": "end" });
  return t => { text.textContent = `${kept(ranks[r], t).length}/${peak[r]}`; };
}

function stripOf(parent, { ranks, peak, several, at }, r, { W, left, top, lane, strip, perTick }) { // a box for each forward that is kept
  const y = top(r) + lane + 6, room = min(W - left - 2, TICKS * perTick), step = min(24, 0.5 * room / max(...peak, 1)), wide = step >= 16;
  const boxes = range(peak[r], i => {
    const g = make("g", parent, { style: `--c:${color(r)}` });
    make("rect.lk-keep", g, { x: left + i * step, y, width: max(1.5, step - 3), height: strip, rx: wide ? 3 : 1 });
    return [g, wide ? make("text.lk-tiny", g, { x: left + i * step + (step - 3) / 2, y: y + strip / 2 + 4, "text-anchor": "middle" }) : null];
  });
  const from = left + peak[r] * step + 4, words = make("text.lk-tiny", parent, { x: from, y: y + strip / 2 + 4 });
  const lost = make("text.lk-tiny", parent, { x: left + room, y: y + strip / 2 + 4, "text-anchor": "end" });
  let last;
  return t => {
    const held = kept(ranks[r], t), k = held.length, gone = "idle " + at(idle(ranks[r], t)), now = held.map(x => x.m) + gone.length;
    lost.textContent = gone;
    if (last === (last = now)) return;
    boxes.forEach(([g, text], i) => {
      g.setAttribute("class", i < k ? "in" : "");
      if (text) text.textContent = held[i]?.m ?? "";
    });
    words.textContent = fit([several ? num(k, "forward") + " kept" : `activations of ${num(k, "micro-batch").replace("hs", "hes")}`, `${k} kept`, "" + k], left + room - from - 6.3 * gone.length - 8) ?? "";
  };
}

function chips(ui, { moves, hop }, { top, lane, W, left }) { // outputs and gradients on their way, at the time that it is
  const pool = [], layer = make("svg.lk-move lk-chips", ui.rest.parentNode, { width: W, height: ui.rest.getAttribute("height"), "aria-hidden": true }), still = matchMedia("(prefers-reduced-motion: reduce)");
  const middle = r => top(r) + lane / 2, smooth = p => p * p * (3 - 2 * p);
  return t => {
    const flying = moves.filter(({ a, z }) => due(a, t) && t < max(z, a + hop) - NEAR);
    while (pool.length < flying.length) {
      const g = make("g.lk-chip", layer);
      pool.push([g, make("rect", g, { x: -11, y: -8, width: 22, height: 16, rx: 8 }), make("text", g, { y: 4, "text-anchor": "middle" })]);
    }
    pool.forEach(([g, , text], i) => {
      const move = flying[i];
      g.setAttribute("class", "lk-chip" + (move ? "" : " off"));
      if (!move) return;
      const { x, to, a, z } = move, done = still.matches ? 0.5 : 0.3 + 0.7 * smooth(clamp((t - a) / max(z - a, hop)));
      g.setAttribute("transform", `translate(${clamp(ui.x(t) - left, W - left - 12) + left} ${middle(x.r) + (middle(to) - middle(x.r)) * done})`);
      g.setAttribute("style", `--c:var(--k${x.kind})`);
      text.textContent = x.m + (to > x.r ? "↓" : "↑");
    });
  };
}

// # words
function tell(run, t) { // what happens at a stop: [text, words to stress, text]
  const { n, ranks, acts, home, at, peak, ends, batches } = run, notes = [];
  const first = acts.filter(x => near(x.a, t) && x.z - x.a > NEAR), says = Object.keys(KINDS).map(kind => begun(run, first.filter(x => x.kind === kind))).filter(Boolean);
  if (due(TICKS, t)) return ends ? ["The order ends here and is not complete. ", ends.map(upper).join(". ") + "."] : [`Every micro-batch has gone forward and back on every stage. `, `Done after ${at(t)}.`];
  if (t < NEAR) return [says.join(" "), n > 1 ? ` ${n > 2 ? "Every other rank" : "The other rank"} waits for what comes from there.` : ""];
  for (const r of range(n).filter(r => ranks[r].some(x => near(x.z, t)))) { // whose action ends
    const own = ranks[r], k = kept(own, t).length, last = own.find(x => near(x.z, t)), next = own.find(x => x.a > last.a && x.z > t + NEAR);
    if (last.kind === "F" && k === peak[r] && peak[r] > 1 && !own.some(x => x.z < t - NEAR && kept(own, x.z).length === k)) notes.push([0, `Rank ${r} holds ${k} ${run.several ? "forwards" : "micro-batches"}, the most it ever will` + (next && next.kind !== "F" && own.some(x => x.a > t && x.kind === "F") ? ": it may not start the next forward until a backward has freed one." : ".")]);
    if (!next) notes.push([2, `Rank ${r} ${ends ? "stops" : "is done"}.`]);
    else if (next.a > t + NEAR) notes.push([1, `Rank ${r} waits: ${missing(run, next, t)}.`]);
  }
  const waits = notes.filter(([level]) => level === 1), told = [0, 1, 2].flatMap(level => notes.filter(note => note[0] === level).slice(0, 1));
  if (waits.length > 1) told.splice(told.indexOf(waits[0]) + 1, 0, [1, `${upper(who(waits.slice(1).map(([, text]) => +text.match(/\d+/)[0])))} wait${waits.length > 2 ? "" : "s"} too.`]);
  return [says.join(" ") + (says.length && told.length ? " " : ""), told[0]?.[1] ?? (says.length ? "" : `After ${at(t)}.`), told.slice(1).map(([, text]) => " " + text).join("")];
}

function begun({ several }, list) { // what actions of one kind begin
  if (!list.length) return "";
  const [one, many] = KINDS[list[0].kind], batches = list.map(x => x.m);
  if (list.length === 1) return `Rank ${list[0].r} starts the ${one} of micro-batch ${list[0].m}${several ? ` on stage ${list[0].s}` : ""}.`;
  return `${upper(who(list.map(x => x.r)))} start ${many} of ${new Set(batches).size > 1 ? "micro-batches " + and(batches) : "micro-batch " + batches[0]}.`;
}

function missing({ acts, moves }, next, t) { // what an action waits for
  const forward = next.kind === "F", from = next.s + (forward ? -1 : 1), what = forward ? "output" : "gradient";
  const giver = acts.find(x => x.s === from && x.m === next.m && RESULT[x.kind] === what);
  return `the ${what} of micro-batch ${next.m} ${giver && due(giver.z, t) ? "is on its way from" : "has not come from"} stage ${from}`;
}

function follow({ acts, at, several, stages }, m) { // a micro-batch's way
  const own = acts.filter(x => x.m === m), on = kind => own.filter(x => kind.includes(x.kind)), way = list => `${at(min(...list.map(x => x.a)))} to ${at(max(...list.map(x => x.z)))}`;
  const there = on("F"), back = on("BI"), freed = there.map(f => [f, own.find(x => x.s === f.s && "BW".includes(x.kind))]).filter(pair => pair[1]).map(([f, b]) => [b.z - f.z, f.s]).sort((a, b) => b[0] - a[0]);
  return [`Micro-batch ${m}`, `: forward ${there.length ? way(there) : "never"}, backward ${back.length ? way(back) : "never"}` + (freed.length ? `; kept longest by stage ${freed[0][1]}, for ${at(freed[0][0])}` : "")];
}

function legend(row, runs) { // what the blocks' colours and lines mean
  row.replaceChildren();
  const deep = max(...runs.flatMap(run => run.stages.map(list => list.length))), entry = (swatch, text) => { const e = make("span", row); e.innerHTML = swatch; e.append(text); };
  for (const kind in KINDS) if (runs.some(run => run.acts.some(x => x.kind === kind))) entry(`<i class="k${kind}">${kind}</i>`, KINDS[kind][0]);
  for (const k of range(deep - 1, i => i + 1)) entry(`<i class="kF" style="border-top:${1 + 2 * k}px double var(--bg)">&nbsp;</i>`, `${num(k, "line")}: a rank's ${["second", "third", "fourth"][k - 1] ?? "next"} stage`);
  entry('<i class="idle">&nbsp;</i>', "idle");
}

// # widget
function mountPipeline(el, data, opts) {
  const race = data.view === "race", decoded = {}, state = { t: 0, speed: 1, playing: false, stops: () => stops, wait: () => false, rate: step => max(TICKS / 14, (step || 0) / 0.7) };
  let runs, stops, total_s, stages, said, followed = null;
  const ui = shell(el, data, state, { build, draw, turn: by => turn(by) }), { root, field, caption } = ui, key = make("div.lk-key lk-small"), told = make("p.lk-told lk-small", root), foot = race ? () => {} : footer(root, 5);
  field.after(key);
  const which = race ? () => 0 : choices(ui.more, data, choose), own = (run, t) => min(TICKS, t * total_s / run.step_s);

  function choose() { // the clock goes on from where it is, and an end stays an end
    const now_s = state.t === TICKS ? Infinity : state.t * (total_s ?? 0);
    runs = (race ? data.runs.map((_, i) => i) : [which()]).map(i => (decoded[i] ??= decode(data.runs[i])));
    total_s = max(...runs.map(run => run.step_s));
    stops = runs.flatMap(run => run.stops.map(t => t * run.step_s / total_s)).sort((a, b) => a - b).filter((s, i, all) => !i || !near(s, all[i - 1]));
    stops[stops.length - 1] = TICKS;
    ui.control.halt();
    state.t = min(TICKS, now_s / total_s);
    followed = null;
    ui.source.textContent = [...new Set(runs.map(run => run.source))].join(" / ");
    ui.scrub.build([0, TICKS], "0", { snap: false, steps: stops.length - 1 });
    foot(range(5, i => runs[0].figures[i] ?? ["", ""]));
    legend(key, runs);
    ui.rebuild();
  }
  function build() {
    field.replaceChildren();
    stages = runs.map((run, i) => {
      if (race) heading(field, data.axes[0].values[data.runs[i].at[0]], run);
      return stageOf(field, run, ui.width || 320, total_s, data.title, race);
    });
    caption.style.minHeight = ""; // room for the longest caption, so that nothing below it moves
    const longest = stops.map(say).sort((a, b) => b.join("").length - a.join("").length).slice(0, 4);
    caption.style.minHeight = max(...longest.map(text => { write(text); return caption.clientHeight; })) + "px";
    said = null;
    show(followed);
  }
  const say = t => (race ? tellRace(data.axes[0].values, runs, t, own, total_s) : tell(runs[0], t));
  const write = ([before, stress, after = ""]) => caption.replaceChildren(before, make("b", null, {}, stress), after);
  function draw() {
    if (!stages) return;
    const { t, playing } = state, k = stops.findLastIndex(s => due(s, t));
    stages.forEach(({ paint }, i) => paint(own(runs[i], t)));
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (said = k)) write(say(stops[k]));
    ui.scrub.set(t, k, `${short(t / TICKS * total_s) } of ${short(total_s)}`, -1);
    ui.control.paint();
    Object.assign(root.dataset, { step: k, steps: stops.length - 1, playing, ranks: runs[0].n, batch: followed ?? "" });
    opts.onChange?.({ step: k, playing });
  }
  function show(m) { // the micro-batch that is pointed at, or that the keys chose
    followed = m;
    for (const { mark } of stages) mark(m);
    const text = m === null ? ["", "Point at a block, or press ↑ or ↓, to follow one micro-batch."] : race ? [`Micro-batch ${m}`, ""] : follow(runs[0], m);
    told.replaceChildren(make("b", null, {}, text[0]), text[1]);
    root.dataset.batch = m ?? "";
  }
  const turn = by => show(clamp((followed ?? (by > 0 ? -1 : 1)) + by, max(...runs.map(run => run.batches)) - 1));
  const batchAt = e => e.target.closest("[data-b]")?.dataset.b;
  field.onpointerover = e => { const m = batchAt(e); if (m !== undefined && +m !== followed) show(+m); };
  field.onpointerleave = () => followed !== null && show(null);
  choose();
  return { ...ui, state };
}

function heading(parent, name, run) {
  const head = make("div.lk-head lk-run", parent);
  make("b", head, {}, name);
  make("span", head, {}, run.brief);
}

function tellRace(names, runs, t, own, total_s) {
  const counts = runs.map((run, i) => { const at = own(run, t); return `${names[i]} has ${max(...run.ranks.map((list, r) => kept(list, at).length / run.stages[r].length))} in flight`; });
  const over = runs.map((run, i) => i).filter(i => t * total_s > runs[i].step_s * TICKS * (1 - 1e-7)), now = over.filter(i => near(runs[i].step_s / total_s * TICKS, t));
  const done = now.length ? `${and(now.map(i => names[i]))} ${now.length > 1 ? "are" : "is"} done after ${short(t / TICKS * total_s)}.` : "";
  return [over.length === runs.length ? "" : `After ${t ? short(t / TICKS * total_s) : "0 s"}, on the fullest rank: ${counts.filter((_, i) => !over.includes(i)).join(", ")}. `, done];
}

globalThis.lockstepStages = { planned, stageOf, legend, short, near, KINDS };
define("pipeline", () => mountPipeline);
})();
