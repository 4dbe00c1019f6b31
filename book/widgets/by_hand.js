/* A race against the reader: who sends what to whom on four ranks, and then the ring's answer. It has no data: what is
   sent becomes a schedule, which the twin replays and simulates beside the ring.

   A message goes in the earliest step in which its sender and its receiver are free and the sender has what it sends,
   so that messages of different ranks travel at once. It is added where that counts nobody twice, and replaces a part
   of what it brings; anything else is refused, with the reason. */
import { byTouch, range, make, and, num, seconds, pill, frame, define } from "./scene.js";
import { chunkBar, traffic, busiest, tally } from "./chunks.js";
import { mountRace } from "./player.js";
import { simulatedRun } from "./ring.js";
import { Moves, Schedule } from "../twin/schedule.js";
import { ring_all_reduce } from "../twin/collectives.js";

const RANKS = 4;
const [BAR_W, BAR_H] = [72, 14];
const RING = simulatedRun(ring_all_reduce(RANKS), { kind: "ring" });

/** The schedule of what was sent: [{ src, dst, chunks, ops, step }]. */
function scheduleOf(messages) {
  const moves = new Moves();
  for (const { src, dst, chunks, ops, step } of messages) {
    chunks.forEach((chunk, i) => moves.add(step, src, dst, chunk, ops[i]));
  }
  return new Schedule(RANKS, RANKS, moves);
}

const runOf = messages => simulatedRun(scheduleOf(messages), shapeOf(messages));

function shapeOf(messages) {
  const near = messages.every(({ src, dst }) => (src - dst) % 2);
  return { kind: near ? "ring" : "mesh" };
}

const heldBy = (run, r, c) => run.updates[r][c].at(-1).v;

/** What sending a chunk would do: "reduce", "copy", "" if the receiver has it all, or the ranks counted twice. */
function effect(from, to) {
  const both = range(RANKS).filter(k => from[k] && to[k]);
  if (!both.length) return "reduce";
  if (from.every((x, k) => !x || to[k])) return "";
  return to.every((x, k) => !x || from[k]) ? "copy" : both;
}

/** The earliest step for a message of these chunks after those before it. */
function earliest(messages, src, dst, chunks) {
  let step = 0;
  for (const m of messages) {
    const same = m.chunks.some(c => chunks.includes(c));
    if (same && (m.dst === src || m.dst === dst)) step = Math.max(step, m.step + 1);
    if (same && m.src === dst) step = Math.max(step, m.step);
  }
  const busy = k => messages.some(m => m.step === k && (m.src === src || m.dst === dst));
  while (busy(step)) step++;
  return step;
}

/** A message, or why it can't be sent. */
function message(messages, run, src, dst, chunks) {
  const told = chunks.map(c => [c, effect(heldBy(run, src, c), heldBy(run, dst, c))]);
  const twice = told.find(([, what]) => Array.isArray(what));
  if (twice) {
    const [chunk, ranks] = twice;
    return `Not sent: rank ${dst}'s chunk ${chunk} would count ${named(ranks)} twice.`;
  }
  const useful = told.filter(([, what]) => what);
  if (!useful.length) return `Not sent: rank ${dst} has all of that already.`;
  const [sent, ops] = [useful.map(([c]) => c), useful.map(([, what]) => what)];
  return { src, dst, chunks: sent, ops, step: earliest(messages, src, dst, sent) };
}

const named = ranks => `rank${ranks.length > 1 ? "s" : ""} ${and(ranks)}`;
const chunkNames = list => (list.length === RANKS ? "all its chunks" : `chunk ${and(list)}`);

/** A rank's card: its name, which stands for all of its chunks, and the chunks. */
function card(parent, r, pick) {
  const box = make("div.lk-peer", parent);
  const button = (name, chunks) => {
    const b = make(`button.${name}`, box, { type: "button" });
    b.onclick = () => pick(r, chunks);
    return b;
  };
  const name = button("lk-peername", range(RANKS));
  make("i", name, { style: `background:var(--r${r})` });
  make("b", name, {}, `rank ${r}`);
  const hint = make("span", name);
  const bars = range(RANKS, c => {
    const b = button("lk-peerchunk", [c]);
    make("span", b, {}, c);
    const size = { width: BAR_W + 34, height: BAR_H + 4, "aria-hidden": "true" };
    const svg = make("svg", make("div.lk-stage", b), size);
    return [b, chunkBar(svg, [1, 2, BAR_W, BAR_H], { x: BAR_W + 6, y: BAR_H - 3 })];
  });
  return { box, name, hint, bars };
}

/** Two bars: how much the busiest link carries. */
function score(parent) {
  const box = make("div.lk-handscore lk-small", parent);
  return ["Your busiest link", "The ring's"].map(who => {
    const text = make("span", box, {}, who);
    const line = make("div.lk-line", box);
    const tick = make("div.lk-tick", line);
    return run => {
      const [link, most] = busiest(traffic(run, Infinity));
      const [where, unit] = most ? [", " + link, "n"] : ["", "n (n: a rank's buffer)"];
      text.textContent = `${who}${where}: ${most.toFixed(2)} ${unit}`;
      tick.style.setProperty("--done", Math.min(1, most / (RANKS - 1)));
    };
  });
}

function mountByHand(el) {
  const ui = frame(el, "A race against you");
  const { root, source, caption, alert } = ui;
  const touch = byTouch() ? "Tap" : "Click";
  const state = { messages: [], chosen: null, t: 0, stops: () => [0] };
  let [run, answer] = [runOf([]), null];
  source.textContent = "simulated in this page";
  const board = make("div.lk-byhand", root);
  const cards = range(RANKS, r => card(board, r, pick));
  const [mine, rings] = score(root);
  const row = make("div.lk-more", root);
  const undo = pill(row, "Undo", "Take the last message back", () => change(state.messages.slice(0, -1), ""));
  const again = pill(row, "Start over", "Take all messages back", () => change([], ""));
  const field = make("div", root);
  rings(RING);

  function pick(rank, chunks) {
    const { chosen } = state;
    if (!chosen || chosen.rank === rank) {
      const same = chosen && chosen.chunks.join() === chunks.join();
      state.chosen = same ? null : { rank, chunks };
      return draw(state.chosen ? `${touch} the rank that gets it.` : "");
    }
    const next = message(state.messages, run, chosen.rank, rank, chosen.chunks);
    state.chosen = null;
    if (typeof next === "string") return draw(next);
    change([...state.messages, next], `Rank ${next.src} sent ${chunkNames(next.chunks)} to rank ${rank}.`);
  }
  function change(messages, said) {
    state.messages = messages;
    run = runOf(messages);
    draw(said);
  }
  function draw(said) {
    const [done, all] = tally(run, Infinity);
    const last = state.messages.at(-1);
    const over = done === all;
    cards.forEach(({ box, name, hint, bars }, r) => {
      const own = state.chosen?.rank === r;
      box.classList.toggle("on", own);
      hint.textContent = state.chosen ? (own ? "sends" : "gets it") : "all";
      name.setAttribute("aria-pressed", own && state.chosen.chunks.length === RANKS);
      name.setAttribute("aria-label", state.chosen && !own ? `Send it to rank ${r}` : `All chunks of rank ${r}`);
      bars.forEach(([b, paint], c) => {
        const held = heldBy(run, r, c);
        const whose = named(range(RANKS).filter(k => held[k]));
        b.setAttribute("aria-pressed", !!own && state.chosen.chunks.includes(c));
        b.setAttribute("aria-label", `Rank ${r}, chunk ${c}: data of ${whose}`);
        paint(held, held.every(Boolean), last?.dst === r && last.chunks.includes(c) ? "in" : "");
      });
    });
    mine(run);
    undo.disabled = again.disabled = !state.messages.length;
    caption.textContent = over ? verdict() : `${said || opening()} ${done} of ${all} chunks are complete.`;
    Object.assign(root.dataset, { messages: state.messages.length, complete: done, step: 0, playing: false });
    race(over);
  }
  function opening() {
    if (state.messages.length) return "";
    const how = `${touch} a chunk, or a rank's name for all it holds, then who gets it.`;
    return `Every rank needs the sum of all four. ${how}`;
  }
  function verdict() {
    const [yours, its] = [run, RING].map(r => Math.max(...r.items.map(i => i.s1)));
    const [most, least] = [run, RING].map(r => busiest(traffic(r, Infinity))[1]);
    const times = `${seconds(yours)} and the ring ${seconds(its)}`;
    const told = `You need ${times}, for a buffer of 400 MB on links of 1 GB/s.`;
    const better = most > least + 1e-9 ? `Your busiest link carries ${(most / least).toFixed(1)} times as much.` : "";
    const level = most <= least + 1e-9 ? "Your busiest link carries no more than the ring's." : "";
    return `All complete after ${num(state.messages.length, "message")}. ${told} ${better}${level}`;
  }
  function race(over) {
    if (!over === !answer) return;
    answer?.destroy();
    answer = null;
    if (!over) return;
    const runs = [run, RING];
    const data = { title: "You and the ring", axes: [{ values: ["You", "The ring"] }], runs, view: "ring" };
    answer = mountRace(field, data, {});
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) answer.control.toggle();
  }
  root.onkeydown = e => {
    if (e.key !== "Escape" || !state.chosen) return;
    state.chosen = null;
    draw("");
  };
  draw("");
  const destroy = () => (answer?.destroy(), root.remove());
  return { root, state, alert, destroy, control: { go() {}, end: () => 0, toggle() {} } };
}

define("by_hand", () => mountByHand);
