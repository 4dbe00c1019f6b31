/* Explorers of what crosses a network: all-reduces raced on links, one parameter server or several, and the order of a
   mesh's axes. traffic_explorers.py says what the data mean. */
import { range, make, swatch, bytes, short, sum, and, num } from "./scene.js";
import { explorer, chart, dot, logAxis, pieces, valueAt, zero, bars, trim, lasting, drawBoth } from "./explorer.js";
import * as collectives from "../twin/collectives.js";
import { Link, ring_all_reduce_s } from "../twin/links.js";
import * as plan_bytes from "../twin/plan_bytes.js";
import { Moves, Schedule } from "../twin/schedule.js";
import { durationOf, moveTimes } from "../twin/simulate.js";

const { min, max, ceil } = Math;
const HUES = ["var(--x1)", "var(--x2)", "var(--x0)", "var(--x3)"];
const DASHES = ["2 3", "7 4", "", "10 3 2 3"];
const [SMALLEST, LARGEST] = [1e3, 1e10];
const SIZES = range(71, i => 10 ** (3 + i / 10)); // of the points of a curve

// # all-reduces on links
const schedules = new Map();
/** A schedule is made once: only the links differ from one turn of a dial to the next. */
function scheduleOf(name, ranks) {
  const key = `${name} ${ranks}`;
  if (!schedules.has(key)) schedules.set(key, collectives[name](ranks));
  return schedules.get(key);
}

/** The links of all ranks, and those that are slow. */
function network({ latency_s, bandwidth_bytes_per_s, slow_link, slow_rank }) {
  const slow = new Link(latency_s, bandwidth_bytes_per_s / slow_link);
  const pairs = [
    [0, 1],
    [1, 0],
  ];
  return {
    link: new Link(latency_s, bandwidth_bytes_per_s),
    links: slow_link > 1 ? pairs.map(pair => [...pair, slow]) : [],
    slowdown: { 1: slow_rank },
  };
}

/** Times of each algorithm: now, and against size; and the size from which on the ring is faster than the tree. */
function raced(chosen, data) {
  const { link, ...options } = network(chosen);
  const runs = data.algorithms.map(([label, name], i) => {
    const schedule = scheduleOf(name, chosen.ranks);
    const time = num_bytes => durationOf(schedule, num_bytes, link, options);
    return { label, name, i, time, points: pieces(time, SMALLEST, LARGEST), now: time(chosen.num_bytes) };
  });
  const order = [...runs].sort((a, b) => a.now - b.now);
  return { runs, order, even: meeting(runs.find(isRing), runs.find(isTree)) };
}

const isRing = ({ name }) => name === "ring_all_reduce";
const isTree = ({ name }) => name === "tree_all_reduce";

/** The size at which two algorithms take the same time; null where one is faster at all sizes. */
function meeting(a, b) {
  const ahead = SIZES.map(size => valueAt(a.points, size) < valueAt(b.points, size));
  const i = ahead.findIndex((is, k) => k && is !== ahead[k - 1]);
  return i < 0 ? null : zero(size => a.time(size) - b.time(size), SIZES[i - 1], SIZES[i]);
}

function drawRace(field, W, { runs, order, even }, { num_bytes }) {
  const row = ({ i, now, label }) => {
    const [hue, dash] = [HUES[i], DASHES[i]];
    return { label, parts: [[now, hue]], text: short(now), best: label === order[0].label, hue, dash };
  };
  bars(field, W, runs.map(row));
  const times = runs.flatMap(run => run.points.map(([, s]) => s));
  const [low, high] = [min(...times), max(...times)];
  const axes = {
    x: logAxis(SMALLEST, LARGEST, W < 560 ? 4 : 8, size => trim(bytes(size)), "size of the buffer"),
    y: logAxis(low / 4, high * 1.3, 6, short, "time"),
  };
  const curves = runs.map(({ i, points }) => {
    return { points: SIZES.map(size => [size, valueAt(points, size)]), hue: HUES[i], dash: DASHES[i] };
  });
  const name = `time against size of ${runs.map(run => run.label).join(", ")}`;
  const set = chart(field, { W, H: 180, axes, curves, now: num_bytes, name });
  if (!even) return;
  const meet = [even, runs.find(isRing).time(even)];
  if (W < 520) dot(set, meet, "n*", 0);
  else dot(set, meet, `n* = ${trim(bytes(even))}`, W, 16);
}

function tellRace({ order, even, runs }, { ranks, num_bytes, slow_link, slow_rank }) {
  const [best, ...rest] = order;
  const times = rest.map(({ label, now }) => `${label} ${times_(now / best.now)}`);
  const slow = [
    slow_link > 1 && `the link between ranks 0 and 1 ${slow_link} times slower`,
    slow_rank > 1 && `rank 1 ${slow_rank} times slower`,
  ].filter(Boolean);
  const how = slow.length ? `, with ${slow.join(" and ")}` : "";
  const head = `On ${ranks} ranks, ${trim(bytes(num_bytes))}${how}: `;
  const [ring, tree] = [isRing, isTree].map(is => runs.find(is).now);
  const always = ring < tree ? "ring is faster than the tree" : "tree is as fast as the ring or faster";
  const last = even
    ? ` Ring and tree take the same time at n* = ${trim(bytes(even))}; above it the ring is faster.`
    : ` The ${always} at every size here.`;
  return [
    ["", head],
    [`${best.label} is fastest, ${short(best.now)}`, `; ${times.join(", ")}.`],
    ["", last],
  ];
}

const times_ = x => (x < 1.005 ? "as fast" : `${x < 10 ? x.toPrecision(3) : Math.round(x)}×`);

function figuresOfRace({ runs }, { ranks, num_bytes }) {
  return runs.map(({ label, name, now }) => {
    const sent = max(...scheduleOf(name, ranks).sent_bytes(num_bytes));
    const speed = trim(bytes(num_bytes / (now || Infinity)));
    return [trim(bytes(sent)), `sent by the busiest rank, ${label}: ${speed}/s of the buffer`];
  });
}

const LANES = { send: "F", collective: "B", compute: "W" };
const SAID = { send: "message sent", collective: "collective", compute: "computing" };
const NO_MESSAGES = "This recording has no messages with times, and no collectives: launch with record=True.";

/** A reader's recording above the ring that does as much on the links that are chosen. */
function besideRing(parent, W, trace, chosen, data) {
  const isSend = ({ kind }) => kind === "send";
  const isSent = ({ kind }) => kind === "send" || kind === "collective";
  const { n, events } = lasting(trace, ({ kind }) => kind in LANES, NO_MESSAGES, isSent);
  return (events.some(isSend) ? besideMessages : besideCollectives)(parent, W, { trace, n, events }, chosen, data);
}

/** A recording of collectives alone, above its all-reduces as rings on these links. */
function besideCollectives(parent, W, { n, events }, { latency_s, bandwidth_bytes_per_s }, data) {
  const link = new Link(latency_s ?? data.latency_s, bandwidth_bytes_per_s);
  const yours = events.map(e => ({ ...e, kind: LANES[e.kind], text: "" }));
  const all = events.filter(({ kind }) => kind === "collective");
  const called = all.filter(({ lane }) => lane === all[0].lane); // of one rank
  const members = ({ group }) => group ?? range(n);
  const reduces = all.filter(e => e.op === "all_reduce" && e.lane === members(e)[0]).sort((x, y) => x.start - y.start);
  const free = Array(n).fill(0);
  const rings = reduces.flatMap(e => {
    const ranks = members(e);
    const start = max(...ranks.map(lane => free[lane]));
    const end = start + ring_all_reduce_s(ranks.length, e.num_bytes ?? 0, link);
    return ranks.map(lane => ({ lane, kind: "B", start, end: (free[lane] = end), text: "" }));
  });
  const kinds = Object.keys(LANES).map(kind => [LANES[kind], SAID[kind], "\u00a0"]);
  const both = [["your recording", yours], ["its all-reduces as rings", rings]].slice(0, rings.length ? 2 : 1);
  const [took, ideal] = drawBoth(parent, W, range(n, r => `rank ${r}`), kinds, both);
  const rest = rings.length ? `; ${num(reduces.length, "all-reduce")} as rings on these links, ${short(ideal)}.` : ".";
  return [["", ` Your recording: ${num(n, "rank")}, ${num(called.length, "collective")}, `], [short(took), rest]];
}

/** One of messages, above a ring that sends as much. */
function besideMessages(parent, W, { trace, n, events }, { latency_s, bandwidth_bytes_per_s }, data) {
  const isSend = ({ kind }) => kind === "send";
  const buffer = (max(...trace.message_bytes()) * n) / (2 * (n - 1)); // of the ring that sends as much
  const ring = scheduleOf("ring_all_reduce", n);
  const link = new Link(latency_s ?? data.latency_s, bandwidth_bytes_per_s);
  const { start_s, done_s } = moveTimes(ring, buffer, link);
  const yours = events.map(e => ({ ...e, kind: LANES[e.kind], text: e.chunk }));
  const theirs = range(ring.moves.length, i => {
    return { lane: ring.moves.src[i], kind: "F", start: start_s[i], end: done_s[i], text: ring.moves.chunk[i] };
  });
  const kinds = Object.keys(LANES).map(kind => [LANES[kind], SAID[kind], "\u00a0"]);
  const both = [["your recording", yours], ["a ring that sends as much", theirs]];
  const [took, ideal] = drawBoth(parent, W, range(n, r => `rank ${r}`), kinds, both);
  const most = trim(bytes(max(...trace.message_bytes())));
  const times = `yours took ${(took / ideal).toPrecision(3)} times that.`;
  const sends = events.filter(isSend);
  return [
    ["", ` Your recording: ${num(n, "rank")}, ${num(sends.length, "message")}, at most ${most} from one rank, `],
    [short(took), `; a ring that sends as much on these links takes ${short(ideal)}: ${times}`],
  ];
}

explorer("race_explorer", {
  beside: besideRing,
  ...{ answer: raced, draw: drawRace, tell: tellRace, figures: figuresOfRace },
  told: ({ even, order }) => ({ even: even ?? "", fastest: order[0].name }),
});

// # parameter servers
/** As chapter 15 has it: chunk c is kept by server c % servers; gradients in, sums out. */
function servers(count, world_size) {
  const moves = new Moves();
  for (let chunk = 0; chunk < world_size; chunk++) {
    const server = chunk % count;
    for (let turn = 1; turn < world_size; turn++) {
      const other = (server + turn) % world_size;
      moves.add(turn - 1, other, server, chunk, "reduce");
      moves.add(world_size + turn - 2, server, other, chunk, "copy");
    }
  }
  return new Schedule(world_size, world_size, moves);
}

/** A round with each number of servers that share the chunks evenly, and the ring. */
function served({ ranks, servers: wanted, num_bytes, ...rest }, data) {
  const { link, ...options } = network({ slow_link: 1, slow_rank: 1, latency_s: data.latency_s, ...rest });
  const run = (count, order) => {
    const most = max(...order.sent_bytes(num_bytes));
    return { count, most, time: durationOf(order, num_bytes, link, options) };
  };
  const all = range(ranks, i => i + 1)
    .filter(k => ranks % k === 0 || k === wanted)
    .map(k => run(k, servers(k, ranks)));
  const now = all.find(one => one.count === min(wanted, ranks));
  return { all, now, ring: run(0, collectives.ring_all_reduce(ranks)) };
}

function drawServers(field, W, { all, now, ring }) {
  const row = (one, label) => {
    return { label, parts: [[one.time, one === now ? HUES[0] : HUES[3]]], text: short(one.time), best: one === now };
  };
  bars(field, W, [...all.map(one => row(one, num(one.count, "server"))), row(ring, "ring")], 92);
}

function tellServers({ now, ring, all }, { ranks, num_bytes }) {
  const slower = now.time / ring.time;
  const than = slower < 1.005 ? "as fast as the ring" : `${slower.toPrecision(3)} times as long as the ring`;
  const last = all.at(-1);
  const equal = last === now ? "" : ` With ${ranks} servers, one on each machine, it takes ${short(last.time)}.`;
  const share = now.count === 1 ? "keeps everything" : `keep ${trim(bytes(num_bytes / now.count))} each`;
  return [
    ["", `${num(now.count, "server")} of ${ranks} machines ${share}: the busiest link carries `],
    [trim(bytes(now.most)), ` each way, and a round takes ${short(now.time)}, ${than}.${equal}`],
  ];
}

explorer("server_explorer", {
  ...{ answer: served, draw: drawServers, tell: tellServers, beside: besideRing },
  /** There are no more servers, counted from 1 on, than machines. */
  refine: (at, dials) => (at[0] = min(at[0], dials[1].values[at[1]] - 1)),
  told: ({ now }) => ({ length: now.time, most: now.most }),
});

// # the order of a mesh's axes
const AXES = ["pp", "dp", "cp", "tp", "ep"];
const ORDERS = ["pp dp cp tp", "dp cp pp tp", "pp tp dp cp", "dp cp tp pp", "tp pp dp cp", "tp dp cp pp"];

/** What a rank of a middle stage sends along each axis, and last its experts' gradients: as sent_along has it. */
function sentAlong({ pp, dp, cp, tp, ep }, { layers, width, tokens, batches, experts, choices }) {
  const [n, often, reduced] = [(2 * tokens * width) / cp, (batches * layers) / pp, plan_bytes.sharded_sent_bytes];
  const weights = (2 * layers * width ** 2) / pp;
  return [
    pp > 1 ? 2 * batches * n : 0,
    reduced(0, dp * cp, (12 * weights) / tp),
    cp > 1 ? (often * (6 * cp - 4) * n) / tp : 0,
    often * plan_bytes.tensor_parallel_sent_bytes(tp, n),
    (often * 4 * choices * n * (ep - 1)) / ep / tp,
    ep > 1 ? reduced(0, (dp * cp * tp) / ep, (2 * experts * weights) / ep) : 0,
  ];
}

/** Which part of the hops along each of them leads to another node. All sizes are powers of two. */
function crossing(order, sizes, node) {
  const { pp, dp, cp, tp, ep } = sizes;
  const names = order.split(" ");
  const stride = axis => names.slice(names.indexOf(axis) + 1).reduce((all, name) => all * sizes[name], 1);
  const ring = (step, size, on) => (step * size > on && size > 1 ? min(1, step / on) : 0);
  const spread = ring(stride("pp"), pp, node);
  // so many neighbours of a stage's ranks are on one node
  const near = node <= stride("pp") ? node : max(stride("pp"), node / pp);
  return [
    spread && (spread * pp - 1) / (pp - 1),
    ring(stride("cp"), dp * cp, node),
    ring(stride("cp"), cp, node),
    ring(stride("tp"), tp, node),
    ep > 1 ? (ep - min(ep, near)) / (ep - 1) : 0,
    ring(ep, (dp * cp * tp) / ep, near),
  ];
}

function ordered({ per_node, order: wanted, ...sizes }, { model }) {
  sizes.ep = min(sizes.ep, sizes.dp * sizes.cp * sizes.tp);
  const sent = sentAlong(sizes, model);
  const ranks = sizes.pp * sizes.dp * sizes.cp * sizes.tp;
  const all = ORDERS.map(order => {
    const across = crossing(order, sizes, per_node).map((share, i) => share * sent[i]);
    across[1] += across.pop();
    return { order, across, total: sum(across) };
  });
  const now = all.find(one => one.order === wanted);
  sent[1] += sent.pop();
  return { all, now, sent, least: min(...all.map(one => one.total)), ranks };
}

function drawAxes(field, W, { all, now, sent }, { per_node }) {
  const row = one => ({
    label: one.order.replaceAll(" ", ", "),
    parts: one.across.map((many, i) => [many, `var(--x${i})`]),
    text: trim(bytes(one.total)),
    best: one === now,
  });
  bars(field, W, all.map(row), 104);
  const legend = make("div.lk-keys lk-small", field);
  AXES.forEach((axis, i) => {
    if (sent[i]) swatch(legend, `var(--x${i})`, axis, "");
  });
  make("span", legend, {}, `outermost axis first; nodes of ${per_node}`);
}

function tellAxes({ now, sent, least, ranks }, { per_node }) {
  const crossed = AXES.filter((_, i) => now.across[i]);
  const inside = AXES.filter((_, i) => sent[i] && !now.across[i]);
  const nodes = num(ceil(ranks / per_node), "node");
  const stays = inside.length ? `; ${and(inside)} ${inside.length > 1 ? "stay" : "stays"} inside` : "";
  const many = now.total / least;
  const than = many < 1.005 ? "no order sends less" : `the best order sends ${trim(bytes(least))}`;
  const who = crossed.length ? `${and(crossed)} ${crossed.length > 1 ? "cross" : "crosses"}` : "nothing crosses";
  return [
    ["", `${now.order.replaceAll(" ", ", ")} on ${ranks} ranks, ${nodes}: `],
    [`${who} the network`, `${stays}. A rank of a middle stage sends ${trim(bytes(now.total))} to other nodes; `],
    ["", `${than}.`],
  ];
}

const figuresOfAxes = ({ now, sent }) => AXES.flatMap((axis, i) => {
  return sent[i] ? [[trim(bytes(now.across[i])), `to other nodes, of ${trim(bytes(sent[i]))} along ${axis}`]] : [];
});

explorer("axes_explorer", {
  ...{ answer: ordered, draw: drawAxes, tell: tellAxes, figures: figuresOfAxes },
  told: ({ now }) => ({ total: now.total, across: now.across.join(" ") }),
  source: "computed in this page",
});
