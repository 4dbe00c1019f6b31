/* Lockstep's pipeline player: what every rank runs and keeps, and what travels; pipeline.py says what the data mean. */
(() => {
const { range, clamp, make, color, and, seconds, choices, footer, shell, define } = globalThis.lockstepControls, { TICKS, fit, lanes, axis } = globalThis.lockstepLanes;
const { min, max, abs } = Math, NEAR = 0.01, RESULT = { F: "output", B: "gradient", I: "gradient" };
const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const near = (a, b) => abs(a - b) < NEAR, due = (a, t) => a < t + NEAR, upper = text => text[0].toUpperCase() + text.slice(1);
const num = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`, named = list => `Rank${list.length > 1 ? "s" : ""} ${and(list)}`, short = s => (s < 1e-12 ? "0 s" : seconds(s).replace(/(\.\d*[1-9])0+ |\.0+ /, "$1 "));
const apart = times => times.sort((a, b) => a - b).filter((t, i, all) => !i || !near(t, all[i - 1]));

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

function planned(run) { // what follows from the actions
  const { ranks, stages } = run, home = [], acts = ranks.flat(), most = ranks.map(own => own.map(x => kept(own, x.z).length)), peak = most.map(list => max(0, ...list));
  stages.forEach((list, r) => list.forEach(s => { home[s] = r; }));
  for (const x of acts) x.to = RESULT[x.kind] ? home[x.s + (x.kind === "F" ? 1 : -1)] ?? x.r : x.r;
  return { who: range(run.n), ...run, acts, peak, full: most.map((list, r) => ranks[r][list.indexOf(peak[r])]?.z), stops: apart([0, TICKS, ...acts.flatMap(x => [x.a, x.z])]), several: stages.some(list => list.length > 1), at: t => short(t / TICKS * run.step_s) };
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

const write = (parent, x, y, text, anchor = "start", look = "tiny") => make("text.lk-" + look, parent, { x, y, "text-anchor": anchor }, text);

// # stage: for each rank a lane of its actions, and a strip of what it keeps
function plan({ n, step_s }, W, total_s, tight) {
  const small = tight || n > 4, left = W < 560 ? 66 : tight ? 108 : 84, [lane, strip, gap] = tight ? [16, 0, 4] : small ? [20, 12, 13] : [30, 14, 22];
  const each = lane + strip + gap, y = 6 + n * each;
  return { W, H: y + 20, left, small, tight, y, lane, strip, top: r => 10 + r * each, perTick: (W - left - 2) * step_s / total_s / TICKS };
}

function stageOf(parent, run, W, total_s, name, tight, picked) { // returns what paints a moment, and what marks a micro-batch
  const set = plan(run, W, total_s, tight), { left, lane, top, small } = set, { ranks, stages, several, who } = run;
  const rows = ranks.map((own, r) => ({ y: top(r), h: lane, blocks: own.map(({ a, z, kind, m, s }) => ({ a, b: z, c: `var(--k${kind})`, key: m, look: "k" + kind, marks: stages[r].indexOf(s), pad: 3, lines: [[several ? `${kind}${m} of ${s}` : kind + m, kind + m, "" + m]] })) }));
  const ui = lanes(parent, { ...set, name, rows }), { rest } = ui;
  axis(ui, set, run.step_s, total_s);
  if (picked >= 0) make("rect.lk-pick", rest, { x: left - 2, y: top(picked) - 2, width: W - left + 2, height: lane + 4, rx: 5 });
  const trail = make("path.lk-trail", rest), strips = ranks.map((_, r) => {
    const list = stages[r].join(", "), of = fit([`stage${stages[r].length > 1 ? "s" : ""} ${list}`, list], left - 12);
    make("circle", rest, { cx: 5, cy: top(r) + lane / 2 - (small ? 0 : 6), r: 4, fill: color(who[r]) });
    write(rest, 14, top(r) + lane / 2 + (small ? 4.5 : -1.5), (tight && W < 560 ? "" : "rank ") + who[r], "start", "rank");
    if (!small) write(rest, 14, top(r) + lane / 2 + 12, of);
    if (tight) { // no strip, a number
      const tally = write(rest, left - 8, top(r) + lane / 2 + 4, "", "end");
      return t => { tally.textContent = `${kept(ranks[r], t).length}/${run.peak[r]}`; };
    }
    write(rest, 14, top(r) + lane + 6 + set.strip / 2 + (small ? 1 : 4), small ? of : "holds");
    return stripOf(rest, run, r, set);
  });
  const travel = tight ? () => {} : chips(ui, run, set), now = tight ? write(rest, left - 8, set.y + 15, "in flight", "end") : write(rest, 0, set.y + 15, "", "start", "rank");
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

function stripOf(parent, { ranks, peak, several, at, who }, r, { W, left, top, lane, strip, perTick }) { // a box for each forward that is kept
  const y = top(r) + lane + 6, room = min(W - left - 2, TICKS * perTick), step = min(24, 0.5 * room / max(...peak, 1)), wide = step >= 16;
  const boxes = range(peak[r], i => {
    const g = make("g", parent, { style: `--c:${color(who[r])}` });
    make("rect.lk-keep", g, { x: left + i * step, y, width: max(1.5, step - 3), height: strip, rx: wide ? 3 : 1 });
    return [g, wide && write(g, left + i * step + (step - 3) / 2, y + strip / 2 + 4, "", "middle")];
  });
  const from = left + peak[r] * step + 4, words = write(parent, from, y + strip / 2 + 4), lost = write(parent, left + room, y + strip / 2 + 4, "", "end");
  let last;
  return t => {
    const held = kept(ranks[r], t), k = held.length, gone = "idle " + at(idle(ranks[r], t)), now = held.map(x => x.m) + gone.length;
    lost.textContent = gone;
    if (last === (last = now)) return;
    boxes.forEach(([g, text], i) => {
      g.setAttribute("class", i < k ? "in" : "");
      if (text) text.textContent = held[i]?.m ?? "";
    });
    words.textContent = fit([several ? num(k, "forward") + " kept" : `activations of ${num(k, "micro-batch").replace("hs", "hes")}`, k + " kept"], left + room - from - 6.3 * gone.length - 8) ?? "";
  };
}

function chips(ui, { acts }, { top, lane, W, left }) { // results on their way
  const pool = [], layer = make("svg.lk-move lk-chips", ui.rest.parentNode, { width: W, height: ui.rest.getAttribute("height"), "aria-hidden": true }), still = matchMedia("(prefers-reduced-motion: reduce)");
  const middle = r => top(r) + lane / 2, moves = acts.filter(x => x.to !== x.r), hop = 0.6 * min(...acts.map(x => x.z - x.a).filter(d => d > 0));
  return t => {
    const flying = moves.filter(({ out, there }) => due(out, t) && t < max(there, out + hop) - NEAR);
    while (pool.length < flying.length) {
      const g = make("g.lk-chip", layer);
      make("rect", g, { x: -11, y: -8, width: 22, height: 16, rx: 8 });
      pool.push([g, write(g, 0, 4, "", "middle")]);
    }
    pool.forEach(([g, text], i) => {
      const move = flying[i];
      g.setAttribute("class", "lk-chip" + (move ? "" : " off"));
      if (!move) return;
      const { r, m, to, out, there } = move, p = clamp((t - out) / max(there - out, hop)), done = still.matches ? 0.5 : 0.3 + 0.7 * p * p * (3 - 2 * p);
      g.setAttribute("transform", `translate(${clamp(ui.x(t) - left, W - left - 12) + left} ${middle(r) + (middle(to) - middle(r)) * done})`);
      text.textContent = m + (to > r ? "↓" : "↑");
    });
  };
}

// # words
function tell(run, t) { // a stop: [text, words to stress, text]
  const { n, ranks, acts, at, full, ends, who } = run, peaks = [], waits = [], over = [];
  const first = acts.filter(x => near(x.a, t) && x.z - x.a > NEAR), says = Object.keys(KINDS).map(kind => begun(run, first.filter(x => x.kind === kind))).filter(Boolean).join(" ");
  if (due(TICKS, t)) return ends ? ["The order ends here and is not complete. ", ends.map(upper).join(". ") + "."] : ["Every micro-batch has gone forward and back on every stage. ", `Done after ${at(t)}.`];
  if (t < NEAR) return [says, n > 1 ? ` ${n > 2 ? "Every other rank" : "The other rank"} waits for what comes from there.` : ""];
  ranks.forEach((own, r) => {
    if (!own.some(x => near(x.z, t))) return;
    const next = own.find(x => x.z > t + NEAR), k = kept(own, t).length;
    if (k > 1 && near(full[r], t)) peaks.push(`Rank ${who[r]} holds ${k} ${run.several ? "forwards" : "micro-batches"}, the most it ever will` + (next && next.kind !== "F" && own.some(x => x.a > t && x.kind === "F") ? ": it may not start the next forward until a backward has freed one." : "."));
    if (!next) over.push(who[r]);
    else if (next.a > t + NEAR) waits.push([who[r], `Rank ${who[r]} waits: ${missing(run, next, t)}.`]);
  });
  const [wait, ...more] = waits, told = [peaks[0], wait?.[1], more.length && `${named(more.map(([r]) => r))} wait${more.length > 1 ? "" : "s"} too.`, over.length && `${named(over)} ${over.length > 1 ? "are" : "is"} ${ends ? "at the end of its order" : "done"}.`].filter(Boolean);
  return [says + (says && told.length ? " " : ""), told[0] ?? (says ? "" : `After ${at(t)}.`), told.slice(1).map(text => " " + text).join("")];
}

function begun({ several, who }, list) { // what actions of one kind begin
  if (!list.length) return "";
  const kind = KINDS[list[0].kind], batches = list.map(x => x.m);
  if (list.length === 1) return `Rank ${who[list[0].r]} starts the ${kind} of micro-batch ${list[0].m}${several ? ` on stage ${list[0].s}` : ""}.`;
  return `${named(list.map(x => who[x.r]))} start ${kind}s of ${new Set(batches).size > 1 ? "micro-batches " + and(batches) : "micro-batch " + batches[0]}.`;
}

function missing({ acts }, next, t) { // what an action waits for
  const forward = next.kind === "F", from = next.s + (forward ? -1 : 1), what = forward ? "output" : "gradient";
  const giver = acts.find(x => x.s === from && x.m === next.m && RESULT[x.kind] === what);
  return `the ${what} of micro-batch ${next.m} ${giver && due(giver.z, t) ? "is on its way from" : "has not come from"} stage ${from}`;
}

function follow({ acts, at }, m) { // a micro-batch's way
  const own = acts.filter(x => x.m === m), on = kinds => own.filter(x => kinds.includes(x.kind)), way = list => (list.length ? `${at(min(...list.map(x => x.a)))} to ${at(max(...list.map(x => x.z)))}` : "never");
  const [longest] = on("BW").map(b => [b.z - own.find(f => f.s === b.s).z, b.s]).sort((a, b) => b[0] - a[0]);
  return `: forward ${way(on("F"))}, backward ${way(on("BI"))}` + (longest ? `; kept longest by stage ${longest[1]}, for ${at(longest[0])}` : "");
}

function legend(row, runs) { // what the blocks' colours and lines mean
  const deep = max(...runs.flatMap(run => run.stages.map(list => list.length))), entries = Object.keys(KINDS).filter(kind => runs.some(run => run.acts.some(x => x.kind === kind))).map(kind => [kind, kind, KINDS[kind]]);
  if (deep > 1) entries.push(["F1", "F", deep > 2 ? "each line: a further stage" : "a line: a rank's second stage"]);
  row.innerHTML = [...entries, ["idle", "&nbsp;", "idle"]].map(([look, mark, text]) => `<span><i class="k${look}" style="--c:var(--k${look})">${mark}</i>${text}</span>`).join("");
}

// # widget
function mountPipeline(el, data, opts) {
  const race = data.view === "race", decoded = {}, state = { t: 0, speed: 1, playing: false, stops: () => stops, wait: () => false, rate: step => max(TICKS / 14, (step || 0) / 0.7) };
  let runs, stops, total_s, stages, said, followed = null;
  const ui = shell(el, data, state, { build, draw, turn: by => turn(by) }), { root, field, caption } = ui, key = make("div.lk-key lk-small"), told = make("p.lk-told lk-small", root), foot = race ? () => {} : footer(root, 5);
  field.after(key);
  const which = race ? () => 0 : choices(ui.more, data, choose), own = (run, t) => min(TICKS, t * total_s / run.step_s);

  function choose() { // the clock goes on, and an end stays an end
    const now_s = state.t === TICKS ? Infinity : state.t * (total_s ?? 0);
    runs = (race ? data.runs.map((_, i) => i) : [which()]).map(i => (decoded[i] ??= decode(data.runs[i])));
    total_s = max(...runs.map(run => run.step_s));
    stops = apart(runs.flatMap(run => run.stops.map(t => t * run.step_s / total_s)));
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
      const head = race && make("div.lk-head lk-run", field);
      if (race) { make("b", head, {}, data.axes[0].values[i]); make("span", head, {}, run.brief); }
      return stageOf(field, run, ui.width || 320, total_s, data.title, race);
    });
    caption.style.minHeight = ""; // room for the longest, so that nothing moves
    const longest = stops.map(say).sort((a, b) => b.join("").length - a.join("").length).slice(0, 4);
    caption.style.minHeight = max(...longest.map(text => { tellNow(text); return caption.clientHeight; })) + "px";
    said = null;
    show(followed);
  }
  const say = t => (race ? tellRace(data.axes[0].values, runs, t, total_s) : tell(runs[0], t));
  const tellNow = ([before, stress, after = ""]) => caption.replaceChildren(before, make("b", null, {}, stress), after);
  function draw() {
    if (!stages) return;
    const { t, playing } = state, k = stops.findLastIndex(s => due(s, t));
    stages.forEach(({ paint }, i) => paint(own(runs[i], t)));
    caption.setAttribute("aria-live", playing ? "off" : "polite");
    if (said !== (said = k)) tellNow(say(stops[k]));
    ui.scrub.set(t, k, `${short(t / TICKS * total_s)} of ${short(total_s)}`, -1);
    ui.control.paint();
    Object.assign(root.dataset, { step: k, steps: stops.length - 1, playing });
    opts.onChange?.({ step: k, playing });
  }
  function show(m) { // the micro-batch that is pointed at, or that the keys chose
    followed = m;
    for (const { mark } of stages) mark(m);
    told.replaceChildren(...(m === null ? ["Point at a block, or press ↑ or ↓, to follow a micro-batch."] : [make("b", null, {}, "Micro-batch " + m), race ? "" : follow(runs[0], m)]));
    root.dataset.batch = m ?? "";
  }
  const turn = by => show(clamp((followed ?? (by > 0 ? -1 : 1)) + by, max(...runs.map(run => run.batches)) - 1));
  field.onpointerover = e => { const m = e.target.closest("[data-b]")?.dataset.b; if (m && +m !== followed) show(+m); };
  field.onpointerleave = e => followed !== null && e.pointerType !== "touch" && show(null);
  choose();
  return { ...ui, state };
}

function tellRace(names, runs, t, total_s) { // in flight: in whole ranks' activations
  const left = [], done = [], now = short(t / TICKS * total_s);
  runs.forEach(({ step_s, ranks, stages }, i) => {
    const end = step_s / total_s * TICKS;
    if (near(end, t)) done.push(names[i]);
    else if (t < end) left.push(`${names[i]} has ${max(...ranks.map((own, r) => kept(own, t / end * TICKS).length / stages[r].length))} in flight`);
  });
  return [t < NEAR ? "All begin together." : left.length ? `After ${now}, on the fullest rank: ${left.join(", ")}. ` : "", done.length ? `${and(done)} ${done.length > 1 ? "are" : "is"} done after ${now}.` : ""];
}

globalThis.lockstepStages = { planned, stageOf, short };
define("pipeline", () => mountPipeline);
})();
