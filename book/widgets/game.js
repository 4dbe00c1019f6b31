/* Lockstep's pipeline game. Its rules are those of book.schedule and book.simulate, which a test compares; game.py says
   what the data mean. */
import { byTouch, range, clamp, sum, make, and, short, pill, shell, write, define } from "./scene.js";
import { planned, stageOf } from "./pipeline.js";

const { max, round, floor } = Math;
const TICKS = 1e5;

// # rules: actions { r, kind, m } in the order of placing; stage r is on rank r
const of = (list, r) => list.filter(x => x.r === r);
const held = own => sum(own, x => (x.kind === "F" ? 1 : -1));
const has = (list, r, kind, m) => list.some(x => x.r === r && x.kind === kind && x.m === m);

/** Why an action cannot come next; "" when it can. */
function refusal({ n }, placed, { r, kind, m }) {
  const what = `${kind}${m} of stage ${r}`;
  const waits = `rank ${r} waits at ${what} for `;
  if (has(placed, r, kind, m)) return `rank ${r} runs ${what} when that was done already`;
  if (kind === "F" && r && !has(placed, r - 1, "F", m)) return `${waits}F${m} of stage ${r - 1}`;
  if (kind === "B" && !has(placed, r, "F", m)) return `${waits}F${m} of stage ${r}`;
  if (kind === "B" && r < n - 1 && !has(placed, r + 1, "B", m)) {
    return `${waits}the backward of micro-batch ${m} on stage ${r + 1}`;
  }
  return "";
}

/** When each runs, in seconds. */
function timed({ n, forward_s, backward_s }, placed) {
  const free = range(n, () => 0);
  const there = {};
  return placed.map(({ r, kind, m }) => {
    const needs = kind + (kind === "F" ? r - 1 : r + 1) + "." + m;
    const a = max(free[r], there[needs] ?? 0);
    const z = a + (kind === "F" ? forward_s : backward_s);
    free[r] = there[kind + r + "." + m] = z;
    return { r, s: r, kind, m, a, z };
  });
}

/** Step, bubble and most in flight by rank. */
function scored({ n, batches }, acts) {
  const step_s = max(0, ...acts.map(x => x.z));
  const busy_s = sum(acts, x => x.z - x.a);
  const most = own => max(0, ...own.map((_, i) => held(own.slice(0, i + 1))));
  const done = acts.length === 2 * n * batches;
  return { step_s, share: 1 - busy_s / n / step_s, done, peaks: range(n, r => most(of(acts, r))) };
}

const written = list => list.map(x => x.r + x.kind + x.m).join(",");

function verdict({ known }, placed, { step_s, peaks }) {
  const orderOf = r => String(of(placed, r).map(({ kind, m }) => [kind, m]));
  const same = known.filter(k => k.order.every((own, r) => String(own) === orderOf(r)));
  const goal = known.at(-1);
  const late = round(100 * (step_s / goal.step_s - 1));
  if (same.length) return ` Done after ${short(step_s)}: this is ${and(same.map(k => k.name))}.`;
  const beside = late ? `${late} % longer than` : "as fast as";
  const most = `at most ${max(...peaks)} in flight, ${goal.name} has ${max(...goal.peaks)}.`;
  return ` Done after ${short(step_s)}, ${beside} ${goal.name}; ${most}`;
}

// # widget
function mountGame(el, data, opts) {
  const { n, batches, known } = data;
  const state = { t: 0, speed: 1, playing: false, stops: () => stops, wait: () => false, rate: () => TICKS / 8 };
  let placed = (data.placed ?? []).map(([r, kind, m]) => ({ r, kind, m }));
  let past = placed.map((_, i) => placed.slice(0, i));
  let rank = 0;
  let stops = [0];
  let run, score, paint;
  const ui = shell(el, data, state, { build, draw, turn: by => choose(clamp(rank + by, n - 1)) });
  const { root, field, caption } = ui;
  const board = make("div.lk-board");
  const row = (name, list) => {
    const d = make("div.lk-more", board, { role: "group", "aria-label": name });
    make("span.lk-small", d, {}, name);
    return list.map(([text, act]) => pill(d, text, "", act));
  };
  const kinds = { F: "forward", B: "backward" };
  const action = (kind, m) => [kind + m, () => place(kind, m)];
  const ranks = row(
    "rank",
    range(n, r => ["" + r, () => choose(r)]),
  );
  const pills = Object.keys(kinds).flatMap(kind => {
    return row(
      kinds[kind],
      range(batches, m => action(kind, m)),
    ).map((b, m) => ({ kind, m, b }));
  });
  pill(ui.more, "Undo", "Take one back", undo);
  pill(ui.more, "Restart", "Take all back", () => change([], "Taken back."));
  field.after(board);
  const table = make("table.lk-score lk-small", root);
  ui.source.textContent = data.source;

  function place(kind, m) {
    const next = [...placed, { r: rank, kind, m }];
    const why = refusal(data, placed, next.at(-1));
    if (why)
      return write(caption, [
        ["", "", false],
        [`Not possible: ${why}.`, "", true],
      ]);
    const [now, before] = of(timed(data, next), rank).reverse();
    const idle_s = now.a - (before?.z ?? 0);
    const idle = idle_s > 1e-12 ? `; the rank is idle for ${short(idle_s)} before` : "";
    change(next, `${kind}${m} runs on rank ${rank} from ${short(now.a)} to ${short(now.z)}${idle}.`);
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
    write(caption, [["", `Rank ${r} is next.`]]);
  }
  /** What is placed, on its clock. */
  function show(words) {
    const acts = timed(data, placed);
    const whole_s = max(...known.map(k => k.step_s), ...acts.map(x => x.z));
    const at = s => (s / whole_s) * TICKS;
    const own = r => of(acts, r).map(x => ({ ...x, a: at(x.a), z: at(x.z), out: at(x.z), there: at(x.z) }));
    score = scored(data, acts);
    run = planned({ n, batches, step_s: whole_s, who: range(n), stages: range(n, r => [r]), ranks: range(n, own) });
    stops = run.stops.filter(t => t <= at(score.step_s) + 0.01);
    ui.control.halt();
    state.t = stops.at(-1);
    ui.scrub.build([0, max(1, state.t)], "0", { snap: false, steps: stops.length - 1 });
    write(caption, [
      ["", words],
      [score.done ? verdict(data, placed, score) : "", ""],
    ]);
    ui.rebuild();
  }
  function build() {
    if (!run) return;
    caption.style.minHeight = ui.width < 520 ? "7.3em" : "";
    field.replaceChildren();
    ({ paint } = stageOf(field, run, ui.width || 320, run.step_s, data.title, false, rank));
    ranks.forEach((b, r) => {
      b.classList.toggle("on", r === rank);
      b.setAttribute("aria-pressed", r === rank);
    });
    for (const { kind, m, b } of pills) {
      const did = has(placed, rank, kind, m);
      const can = !refusal(data, placed, { r: rank, kind, m });
      b.className = "lk-pill" + (did ? " did" : can ? " on" : "");
      b.title = `${kind}${m} on rank ${rank}: ${did ? "placed" : can ? "can run" : "not yet"}`;
    }
    table.replaceChildren(...rows().map(drawRow));
  }
  function rows() {
    const share = score.done
      ? `${(100 * score.share).toFixed(1)} %`
      : `${placed.length} of ${2 * n * batches} placed`;
    const yours = ["yours", short(score.step_s), share, score.peaks.join(", ")];
    return [["order", "step", "bubble", "most in flight by rank"], yours, ...known.map(k => k.row)];
  }
  function drawRow(cells, i) {
    const tr = make("tr");
    cells.forEach((text, j) => make(i && j ? "td" : "th", tr, {}, text));
    return tr;
  }
  function draw() {
    if (!paint) return;
    const { t, playing } = state;
    const step = stops.findLastIndex(s => s <= t + 0.01);
    paint(t);
    ui.scrub.set(t, step, run.at(t), -1);
    ui.control.paint();
    const steps = stops.length - 1;
    Object.assign(root.dataset, { step, playing, steps, rank, done: score.done, placed: written(placed) });
    opts.onChange?.({ step, playing, placed: JSON.stringify(placed.map(({ r, kind, m }) => [r, kind, m])) });
  }
  const next = kind => place(kind, range(batches).find(m => !has(placed, rank, kind, m)) ?? batches - 1);
  const keys = { f: () => next("F"), b: () => next("B"), u: undo, backspace: undo };
  root.addEventListener("keydown", e => {
    const act = !e.altKey && !e.ctrlKey && !e.metaKey && keys[e.key.toLowerCase()];
    if (!act) return;
    e.preventDefault();
    act();
  });
  field.onclick = e => {
    const y = e.clientY - field.getBoundingClientRect().top - 4;
    choose(clamp(floor((y / (field.clientHeight - 20)) * n), n - 1));
  };
  const how = "Choose a rank, then its next action: it starts as early as it can.";
  const byKeys = " Keys: ↑ and ↓ for the rank, F and B for its next forward or backward, U to undo.";
  show(how + (byTouch() ? "" : byKeys));
  return { ...ui, state };
}

define("game", () => mountGame);
const { render } = globalThis.lockstepGame;
/** A view that opens later shows what was placed. */
function renderPlaced({ model, el }) {
  const read = trait => JSON.parse(model.get(trait));
  const payload = () => JSON.stringify({ ...read("payload"), placed: read("placed") });
  const own = { get: key => (key === "payload" ? payload() : model.get(key)) };
  const both = new Proxy(model, { get: (_, name) => own[name] ?? model[name].bind(model) });
  return render({ el, model: both });
}
globalThis.lockstepGame.render = renderPlaced;

export { refusal, timed, scored };
