/* A ring all-reduce that runs by itself on the opening page, for as many ranks as the reader wants. It has no data: the
   twin makes the schedule and simulates it here. simulatedRun() is what the player's scripts draw. */
import { range, make, bytes, pill, frame, watchWidth, define } from "./scene.js";
import { gather, retime, stageOf, drawStage, traffic, busiest } from "./chunks.js";
import { OPS } from "../twin/schedule.js";
import { Link } from "../twin/links.js";
import { moveTimes } from "../twin/simulate.js";
import { ring_all_reduce, parameter_server_all_reduce } from "../twin/collectives.js";

const BUFFER = 400e6; // bytes: the gradient of a model with 100 million parameters
const LINK = new Link(20e-6, 1e9);
const [FEWEST, MOST, FIRST] = [2, 12, 4]; // ranks
const [STEPS_A_SECOND, REST_S] = [0.9, 1.6];

/** What a player draws of a schedule, which the twin simulates. */
function simulatedRun(schedule, shape, num_bytes = BUFFER, link = LINK) {
  const { world_size: n, num_chunks: c, moves } = schedule;
  const { start_s, done_s } = moveTimes(schedule, num_bytes, link);
  const own = range(n, rank => range(n, k => Number(k === rank)));
  const updates = range(n, r => range(c, () => [{ k: 0, s: 0, v: own[r] }]));
  const items = [];
  for (const [i, sent, after] of schedule.replay()) {
    const [src, dst, chunk, k] = [moves.src[i], moves.dst[i], moves.chunk[i], moves.step[i]];
    const [s0, s1, end, op] = [start_s[i], done_s[i], k + 1, OPS[moves.op[i]]];
    items.push({ src, dst, chunk, into: chunk, op, k, end, s0, s1, sent, after });
    updates[dst][chunk].push({ k: end, s: s1, v: after });
  }
  const whole = Array(n).fill(1);
  const goals = range(n, () => range(c, () => whole));
  const all = { n, c, S: schedule.num_steps, items, updates, goals, shape, bytes: num_bytes };
  return retime(gather({ ...all, wrong: () => undefined, source: "simulated in this page" }), "steps");
}

const most = run => bytes(busiest(traffic(run, Infinity))[1] * BUFFER);

function sentence(run) {
  const root = simulatedRun(parameter_server_all_reduce(run.n), { kind: "mesh" });
  return (
    `Each of ${run.n} ranks (processes) holds ${bytes(BUFFER)} of gradients and needs the sum. ` +
    `Round the ring no link carries more than ${most(run)} each way; through one rank it is ${most(root)}.`
  );
}

/** Time goes on while the picture is seen and nobody has stopped it. */
function clock(state, box, draw) {
  let [frameOf, last, seen] = [0, null, false];
  const tick = now => {
    const passed = last === null ? 0 : Math.min(0.1, (now - last) / 1000);
    last = now;
    const end = state.run.S;
    state.t += passed * STEPS_A_SECOND;
    if (state.t > end + REST_S * STEPS_A_SECOND) state.t = 0;
    draw();
    frameOf = requestAnimationFrame(tick);
  };
  const set = () => {
    cancelAnimationFrame(frameOf);
    last = null;
    if (seen && state.playing) frameOf = requestAnimationFrame(tick);
  };
  const watch = new IntersectionObserver(([entry]) => {
    seen = entry.isIntersecting;
    set();
  });
  watch.observe(box);
  return { set, stop: () => (cancelAnimationFrame(frameOf), watch.disconnect()) };
}

function mountRing(el) {
  const { root, source, caption, alert } = frame(el, "A ring all-reduce");
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const state = { t: 0, playing: !still, run: null, stops: () => state.run.stops };
  const field = make("div.lk-field", root);
  const row = make("div.lk-play", root);
  const label = make("label.lk-pill lk-ranks", row, {}, "ranks ");
  const ranks = make("input", label, { type: "range", min: FEWEST, max: MOST, value: FIRST, "aria-label": "ranks" });
  const count = make("b", label);
  const pause = pill(row, "", "Let it run, or stop it", () => {
    state.playing = !state.playing;
    paint();
    time.set();
  });
  let stage;
  source.textContent = "simulated in this page";
  caption.setAttribute("aria-live", "off");
  const paint = () => {
    pause.textContent = state.playing ? "Pause" : "Play";
    root.dataset.playing = state.playing;
  };
  const draw = () => {
    const t = Math.min(state.t, state.run.S);
    drawStage(stage, state.run, t, "steps", 0);
    const k = Math.ceil(t - 1e-9);
    const half = k > state.run.S / 2 ? "all-gather" : "reduce-scatter";
    const texts = [`${k} of ${state.run.S}`, k ? half : "start", ""];
    stage.count.forEach((e, i) => (e.textContent = texts[i]));
    root.dataset.step = k;
  };
  const build = () => {
    field.replaceChildren();
    stage = stageOf("ring", field, state.run, field.clientWidth || 320, "A ring all-reduce", () => {});
    draw();
  };
  const choose = () => {
    const n = +ranks.value;
    state.run = simulatedRun(ring_all_reduce(n), { kind: "ring" });
    state.t = still ? n - 1 : 0; // at rest where the sums are complete, each on one rank
    count.textContent = n;
    caption.textContent = sentence(state.run);
    Object.assign(root.dataset, { ranks: n, steps: state.run.S });
    build();
  };
  ranks.oninput = choose;
  const time = clock(state, root, draw);
  choose();
  paint();
  const watch = watchWidth(field, build);
  const go = t => {
    state.playing = false;
    state.t = t;
    paint();
    time.set();
    draw();
  };
  const destroy = () => (time.stop(), watch.disconnect(), root.remove());
  return { root, state, alert, destroy, control: { go, end: () => state.run.S, toggle: () => pause.click() } };
}

define("ring", () => mountRing);

export { simulatedRun };
