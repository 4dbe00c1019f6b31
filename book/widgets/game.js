/* Lockstep's pipeline game. Its rules are those of book.schedule and book.simulate, held equal by a test; game_page.py
   says what the data mean. */
(() => {
const { range, clamp, make, and, pill, shell, define } = globalThis.lockstepControls, { planned, stageOf, short } = globalThis.lockstepStages, { max, round, floor } = Math, TICKS = 1e5;

// # rules: actions { r, kind, m } in the order of placing; stage r is on rank r
const of = (list, r) => list.filter(x => x.r === r), held = own => own.reduce((k, x) => k + (x.kind === "F" ? 1 : -1), 0);
const has = (list, r, kind, m) => list.some(x => x.r === r && x.kind === kind && x.m === m);

function refusal({ n, most }, placed, { r, kind, m }) { // why an action cannot come next; "" when it can
  const what = `${kind}${m} of stage ${r}`, waits = `rank ${r} waits at ${what} for `;
  if (has(placed, r, kind, m)) return `rank ${r} runs ${what} when that was done already`;
  if (kind === "F" && r && !has(placed, r - 1, "F", m)) return `${waits}F${m} of stage ${r - 1}`;
  if (kind === "B" && !has(placed, r, "F", m)) return `${waits}F${m} of stage ${r}`;
  if (kind === "B" && r < n - 1 && !has(placed, r + 1, "B", m)) return `${waits}the backward of micro-batch ${m} on stage ${r + 1}`;
  return kind === "F" && most && held(of(placed, r)) >= most ? `rank ${r} has room for ${most} in flight: a backward has to free one first` : "";
}

function timed({ n, forward_s, backward_s }, placed) { // when each runs, in seconds
  const free = range(n, () => 0), there = {};
  return placed.map(({ r, kind, m }) => {
    const a = max(free[r], there[kind + (kind === "F" ? r - 1 : r + 1) + "." + m] ?? 0);
    return { r, s: r, kind, m, a, z: free[r] = there[kind + r + "." + m] = a + (kind === "F" ? forward_s : backward_s) };
  });
}

function scored({ n, batches }, acts) { // step, bubble and most in flight by rank
  const step_s = max(0, ...acts.map(x => x.z)), busy_s = acts.reduce((all, x) => all + x.z - x.a, 0);
  return { step_s, share: 1 - busy_s / n / step_s, done: acts.length === 2 * n * batches, peaks: range(n, r => max(0, ...of(acts, r).map((_, i, own) => held(own.slice(0, i + 1))))) };
}

const read = text => [...text.matchAll(/(\d+)([FB])(\d+)/g)].map(([, r, kind, m]) => ({ r: +r, kind, m: +m })), write = list => list.map(x => x.r + x.kind + x.m).join(",");

function verdict({ known }, placed, { step_s, peaks }) {
  const names = known.filter(k => k.order.every((line, r) => line === write(of(placed, r)))).map(k => k.name), goal = known.at(-1), { name } = goal, late = round(100 * (step_s / goal.step_s - 1));
  return ` Done after ${short(step_s)}${names.length ? `: this is ${and(names)}.` : `, ${late ? `${late} % longer than` : "as fast as"} ${name}; at most ${max(...peaks)} in flight, ${name} has ${max(...goal.peaks)}.`}`;
}

// # widget
function mountGame(el, data, opts) {
  const { n, batches, known } = data, state = { t: 0, speed: 1, playing: false, stops: () => stops, wait: () => false, rate: () => TICKS / 8 };
  let placed = read(data.placed ?? ""), past = placed.map((_, i) => placed.slice(0, i)), rank = 0, stops = [0], run, score, paint;
  const ui = shell(el, data, state, { build, draw, turn: by => choose(clamp(rank + by, n - 1)) }), { root, field, caption } = ui;
  const board = make("div.lk-board"), row = (name, list) => { const d = make("div.lk-more", board, { role: "group", "aria-label": name }); make("span.lk-small", d, {}, name); return list.map(([text, act]) => pill(d, text, "", act)); };
  const ranks = row("rank", range(n, r => ["" + r, () => choose(r)]));
  const pills = [["F", "forward"], ["B", "backward"]].flatMap(([kind, name]) => row(name, range(batches, m => [kind + m, () => place(kind, m)])).map((b, m) => ({ kind, m, b })));
  pill(ui.more, "Undo", "Take one back", undo);
  pill(ui.more, "Restart", "Take all back", () => change([], "Taken back."));
  field.after(board);
  const table = make("table.lk-score lk-small", root);
  ui.source.textContent = data.source;

  function place(kind, m) {
    const next = [...placed, { r: rank, kind, m }], why = refusal(data, placed, next.at(-1));
    if (why) return say("", `Not possible: ${why}.`, "lk-wrong");
    const [now, before] = of(timed(data, next), rank).reverse(), idle_s = now.a - (before?.z ?? 0);
    change(next, `${kind}${m} runs on rank ${rank} from ${short(now.a)} to ${short(now.z)}${idle_s > 1e-12 ? `; the rank is idle for ${short(idle_s)} before` : ""}.`);
  }
  function change(list, words) {
    past.push(placed);
    placed = list;
    show(words);
  }
  function undo() {
    placed = past.pop() ?? placed;
    show("Taken back.");
  }
  function choose(r) {
    rank = r;
    ui.rebuild();
    say(`Rank ${r} is next.`, "");
  }
  function say(text, stress, look = "") { caption.replaceChildren(text, make("b", null, { class: look }, stress)); }
  function show(words) { // what is placed, on its clock
    const acts = timed(data, placed), whole_s = max(...known.map(k => k.step_s), ...acts.map(x => x.z)), at = s => s / whole_s * TICKS;
    score = scored(data, acts);
    run = planned({ n, batches, step_s: whole_s, stages: range(n, r => [r]), ranks: range(n, r => of(acts, r).map(x => ({ ...x, a: at(x.a), z: at(x.z), out: at(x.z), there: at(x.z) }))) });
    stops = run.stops.filter(t => t <= at(score.step_s) + 0.01);
    ui.control.halt();
    state.t = stops.at(-1);
    ui.scrub.build([0, max(1, state.t)], "0", { snap: false, steps: stops.length - 1 });
    say(words, score.done ? verdict(data, placed, score) : "");
    ui.rebuild();
  }
  function build() {
    if (!run) return;
    caption.style.minHeight = ui.width < 520 ? "7.3em" : "";
    field.replaceChildren();
    ({ paint } = stageOf(field, run, ui.width || 320, run.step_s, data.title, false, rank));
    ranks.forEach((b, r) => { b.classList.toggle("on", r === rank); b.setAttribute("aria-pressed", r === rank); });
    for (const { kind, m, b } of pills) {
      const did = has(placed, rank, kind, m), can = !refusal(data, placed, { r: rank, kind, m });
      b.className = "lk-pill" + (did ? " did" : can ? " on" : "");
      b.title = `${kind}${m} on rank ${rank}: ${did ? "placed" : can ? "can run" : "not yet"}`;
    }
    const rows = [["order", "step", "bubble", "most in flight by rank"], ["yours", short(score.step_s), score.done ? `${(100 * score.share).toFixed(1)} %` : `${placed.length} of ${2 * n * batches} placed`, score.peaks.join(", ")], ...known.map(k => k.row)];
    table.replaceChildren(...rows.map((cells, i) => { const tr = make("tr"); cells.forEach((text, j) => make(i && j ? "td" : "th", tr, {}, text)); return tr; }));
  }
  function draw() {
    if (!paint) return;
    const { t, playing } = state, step = stops.findLastIndex(s => s <= t + 0.01);
    paint(t);
    ui.scrub.set(t, step, run.at(t), -1);
    ui.control.paint();
    const now = { step, playing, placed: write(placed) };
    Object.assign(root.dataset, now, { steps: stops.length - 1, rank, done: score.done });
    opts.onChange?.(now);
  }
  const next = kind => place(kind, range(batches).find(m => !has(placed, rank, kind, m)) ?? batches - 1), keys = { f: () => next("F"), b: () => next("B"), u: undo, backspace: undo };
  root.addEventListener("keydown", e => {
    const act = !e.altKey && !e.ctrlKey && !e.metaKey && keys[e.key.toLowerCase()];
    if (act) { e.preventDefault(); act(); }
  });
  field.onclick = e => choose(clamp(floor((e.clientY - field.getBoundingClientRect().top - 4) / (field.clientHeight - 20) * n), n - 1));
  show("Choose a rank, then its next action: it starts as early as it can. Keys: ↑ and ↓ for the rank, F and B for its next forward or backward, U to undo.");
  return { ...ui, state };
}

define("game", () => mountGame);
const { render } = globalThis.lockstepGame;
Object.assign(globalThis.lockstepGame, { rules: { read, refusal, timed, scored }, render: ({ model, el }) => render({ el, model: new Proxy(model, { // a view that opens later shows what was placed
  get: (_, name) => (name !== "get" ? model[name].bind(model) : key => (key === "payload" ? model.get(key).replace("{", `{"placed":"${model.get("placed")}",`) : model.get(key))) }) }) });
})();
