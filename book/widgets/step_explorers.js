/* Explorers of a training step: the timeline, bubble and memory of a pipeline; buckets behind a backward; sharded
   state; the load of experts. step_explorers.py says what the data mean. */
import { make, swatch, range, sum, num, bytes, short } from "./scene.js";
import { explorer, chart, dot, bars, timeline, lasting, drawBoth, trim, percent } from "./explorer.js";
import { Link, pipeline_bubble, ring_all_reduce_s } from "../twin/links.js";
import * as pipelines from "../twin/pipelines.js";
import * as plan_bytes from "../twin/plan_bytes.js";
import * as streams from "../twin/streams.js";

const { min, max, abs, floor, round } = Math;
const KINDS = Object.entries({ F: "forward", B: "backward", I: "input gradient", W: "weight gradient" });

// # pipelines: a rank's forward of one micro-batch takes 1, however many stages it is cut into
/** Interleaving takes as many groups of micro-batches as are chosen, one for each rank; ZB-V two stages on a rank. */
function refine(at, dials) {
  const i = key => dials.findIndex(dial => dial.key === key);
  const value = key => dials[i(key)].values[at[i(key)]];
  const put = (key, wanted) => (at[i(key)] = dials[i(key)].values.indexOf(wanted));
  const schedule = value("schedule");
  if (schedule === "ZB-V") put("per_rank", 2);
  else if (schedule !== "interleaved") put("per_rank", 1);
  else {
    const most = dials[i("batches")].values.at(-1);
    const groups = max(1, round(value("batches") / value("ranks")));
    put("batches", min(groups, floor(most / value("ranks"))) * value("ranks"));
    put("per_rank", max(2, value("per_rank")));
  }
}

const orders = new Map();
/** An order is made once: only the lengths differ from one turn of a dial to the next. */
function orderOf(name, ranks, per_rank, batches) {
  const sizes = [ranks * per_rank, batches, ...(name === "interleaved" ? [per_rank] : [])];
  const key = [name, ...sizes].join();
  if (!orders.has(key)) orders.set(key, pipelines[name](...sizes));
  return orders.get(key);
}

/** One step of a pipeline: when its actions run, and what follows from that. */
function run({ schedule, ranks, per_rank, ratio, link }, batches, data) {
  const order = orderOf(data.schedules[schedule], ranks, per_rank, batches);
  const wire = link ? new Link(link, 1) : null;
  const times = pipelines.actionTimes(order, 1 / per_rank, ratio / per_rank, wire);
  const step = times.reduce((last, { end_s }) => max(last, end_s), 0);
  const peaks = order.peak_in_flight().map(count => count / per_rank);
  return { batches, times, step, bubble: 1 - (batches * (1 + ratio)) / step, peaks, peak: max(...peaks) };
}

/** The step that is chosen, and others with more and fewer micro-batches. */
function piped(chosen, data) {
  const { schedule, ranks, batches } = chosen;
  const most = data.dials.find(dial => dial.key === "batches").values.at(-1);
  const groups = range(floor(most / ranks), i => (i + 1) * ranks);
  const counts = schedule === "interleaved" ? groups : [1, 2, 4, 8, 16, 32];
  const now = run(chosen, batches, data);
  const others = counts.filter(m => m !== batches && m <= most).map(m => run(chosen, m, data));
  return { now, all: [...others, now].sort((a, b) => a.batches - b.batches), most };
}

function drawPipeline(field, W, { now, all, most }, { ranks, per_rank }) {
  drawTimeline(field, W, now, ranks, per_rank);
  const both = make("div.lk-pair", field);
  const wide = W < 560 ? W : (W - 20) / 2;
  const x = { low: 0, high: most, ticks: range(5, i => (i * most) / 4), text: String, label: "micro-batches" };
  const shape = { H: 130, W: wide, now: now.batches };
  const share = { low: 0, high: 1, ticks: [0, 0.25, 0.5, 0.75, 1], text: v => `${100 * v} %`, label: "bubble" };
  const idle = chart(both, {
    ...{ ...shape, axes: { x, y: share }, name: "bubble against micro-batches" },
    curves: [{ points: all.map(one => [one.batches, one.bubble]), hue: "var(--kB)" }],
  });
  dot(idle, [now.batches, now.bubble], percent(now.bubble), wide);
  const top = max(4, ...all.map(one => one.peak)) * 1.1;
  const y = { low: 0, high: top, ticks: evenly(top), text: String, label: "micro-batches held by the fullest rank" };
  const held = chart(both, {
    ...{ ...shape, axes: { x, y }, name: "most in flight against micro-batches" },
    curves: [{ points: all.map(one => [one.batches, one.peak]), hue: "var(--kF)" }],
  });
  dot(held, [now.batches, now.peak], text(now.peak), wide);
}

const text = x => String(+x.toPrecision(3));
function evenly(top) {
  const step = [1, 2, 4, 5, 8, 10].find(s => top / s <= 5) ?? 10;
  return range(floor(top / step) + 1, i => i * step);
}

/** A lane for each rank. */
function drawTimeline(field, W, { times, step }, ranks, per_rank) {
  const blocks = times.map(({ action: { rank, kind, stage, micro_batch }, start_s, end_s }) => {
    return { lane: rank, kind, start: start_s, end: end_s, text: micro_batch, marked: stage >= ranks };
  });
  timeline(field, W, {
    ...{ blocks, end: step, kinds: KINDS, name: `timeline of ${num(ranks, "rank")}`, left: W < 560 ? 26 : 52 },
    names: range(ranks, r => `${W < 560 ? "" : "rank "}${r}`),
    more: per_rank > 1 ? "underlined: a further stage of the rank" : "",
  });
}

const FORMS = { GPipe: "(p−1)/(m+p−1)", "1F1B": "(p−1)/(m+p−1)", interleaved: "(p−1)/(vm+p−1)" };

/** The bubble beside its closed form, which takes equal stages and messages that take no time. */
function beside({ bubble }, { schedule, ranks, batches, per_rank, link }) {
  const form = pipeline_bubble(ranks, batches, schedule === "ZB-V" ? 1 : per_rank);
  if (schedule === "ZB-V") return `; 1F1B's would be ${percent(form)}`;
  if (abs(form - bubble) < 1e-9) return `, as ${FORMS[schedule]} says`;
  return `; ${FORMS[schedule]} says ${percent(form)}${link ? ", for messages that take no time" : ""}`;
}

function tellPipeline({ now }, chosen) {
  const { schedule, ranks, batches } = chosen;
  const who = `${schedule} on ${ranks} ranks with ${num(batches, "micro-batch").replace(/hs$/, "hes")}`;
  const [first, last] = [now.peaks[0], now.peaks.at(-1)].map(text);
  const apart = `Rank 0 holds up to ${first}, the last rank ${last}`;
  const held = first === last ? `Every rank holds up to ${first}` : apart;
  return [
    ["", `${who}: a step takes as long as ${text(now.step)} forwards, and `],
    [`ranks are idle for ${percent(now.bubble)} of it`, `${beside(now, chosen)}. `],
    ["", `${held} micro-batches' activations.`],
  ];
}

const NO_ACTIONS = "This recording has no forwards and backwards of micro-batches: stage_action records them.";

/** A reader's recording above the chosen schedule with forwards and backwards as long as the reader's on average. */
function recordedPipeline(parent, W, trace, { schedule, per_rank }, data) {
  const isAction = ({ op, micro_batch }) => KINDS.some(([kind]) => kind === op) && micro_batch !== undefined;
  const { n, events } = lasting(trace, isAction, NO_ACTIONS);
  const count = field => 1 + max(...events.map(e => e[field]));
  const [batches, per] = [count("micro_batch"), count("stage") / n];
  if (per !== per_rank) throw new Error(`This recording has ${num(per, "stage")} on a rank: choose as many.`);
  const busy = ops => sum(events.filter(({ op }) => ops.includes(op)), ({ start, end }) => end - start);
  const [forward, backward] = ["F", "BIW"].map(ops => busy(ops) / (batches * per * n));
  const times = pipelines.actionTimes(orderOf(data.schedules[schedule], n, per, batches), forward, backward);
  const ideal = times.map(({ action: { rank, kind, micro_batch }, start_s, end_s }) => {
    return { lane: rank, kind, start: start_s, end: end_s, text: micro_batch };
  });
  const yours = events.map(e => ({ ...e, kind: e.op, text: e.micro_batch }));
  const both = [["your recording", yours], [`${schedule} with your mean times`, ideal]];
  const [took, least] = drawBoth(parent, W, range(n, r => `rank ${r}`), KINDS, both);
  const idle = length => percent(1 - busy("FBIW") / (n * length));
  return [
    ["", ` Your recording: ${num(n, "rank")}, ${batches} micro-batches, idle for ${idle(took)} of `],
    [short(took), `; ${schedule} with your mean times takes ${short(least)}, idle for ${idle(least)}.`],
  ];
}

explorer("pipeline_explorer", {
  ...{ answer: piped, draw: drawPipeline, tell: tellPipeline, refine, beside: recordedPipeline },
  told: ({ now }) => ({ length: now.step, bubble: now.bubble, peak: now.peak }),
});

// # two streams: what computes, and what the network carries
const STREAMS = ["compute", "network"];
const OPS = { forward: "F", backward: "B", all_gather: "I", reduce_scatter: "W", all_reduce: "W" };
const SPELLED = { all_gather: "all-gather", reduce_scatter: "reduce-scatter", all_reduce: "all-reduce" };

/** A step: when each task runs, how long the step takes, and how much of that is computing. */
function timed(tasks) {
  const times = streams.stream_times(tasks);
  const length = stream => sum(tasks, task => (task.stream === stream ? task.duration_s : 0));
  const [compute, network] = STREAMS.map(length);
  return { tasks, times, step: max(...times.map(([, end]) => end)), compute, network };
}

function drawStreams(field, W, { tasks, times, step }, names = (stream, unit) => unit) {
  const kinds = new Map(tasks.map(({ op }) => [OPS[op], [OPS[op], SPELLED[op] ?? op, "\u00a0"]]));
  const blocks = tasks.map(({ stream, op, unit }, i) => {
    const [start, end] = times[i];
    return { lane: STREAMS.indexOf(stream), kind: OPS[op], start, end, text: names(stream, unit) };
  });
  const shown = { names: STREAMS, blocks, end: step, kinds: [...kinds.values()] };
  timeline(field, W, { ...shown, name: "what runs when", left: 62 });
}

/** What is not hidden behind computing. */
const outside = ({ step, compute }) => {
  return step - compute < 1e-9 * step ? "all sending is hidden" : `${short(step - compute)} of sending is not hidden`;
};

// # buckets
function bucketed({ cap, ranks, latency_s, bandwidth_bytes_per_s }, { gradients, s_per_byte, dials }) {
  const link = new Link(latency_s, bandwidth_bytes_per_s);
  const run = size => {
    const tasks = streams.bucketed_backward(gradients, size, ranks, s_per_byte, link);
    return { cap: size, buckets: tasks.length - gradients.length, ...timed(tasks) };
  };
  const all = dials.find(({ key }) => key === "cap").values.map(run);
  const best = all.reduce((a, b) => (b.step < a.step ? b : a));
  return { all, best, now: all.find(one => one.cap === cap) };
}

function drawBuckets(field, W, { all, now }) {
  drawStreams(field, W, now, (stream, unit) => (stream === "network" ? unit : ""));
  const [low, high] = [all[0].cap, all.at(-1).cap];
  const longest = max(...all.map(({ step, network }) => max(step, network)));
  const axes = {
    x: { low, high, tens: true, ticks: all.filter((_, i) => i % 3 === 0).map(({ cap }) => cap), text: inKiB },
    y: { low: 0, high: longest * 1.25, ticks: range(4, i => (i * longest) / 3), text: short, label: "time" },
  };
  axes.x.label = "bucket_cap_mb, as KiB";
  const curves = [
    { points: all.map(({ cap, step }) => [cap, step]), hue: "var(--kB)" },
    { points: all.map(({ cap, network }) => [cap, network]), hue: "var(--kI)", dash: "4 3" },
  ];
  const shown = { W, H: 130, axes, curves, now: now.cap, name: "step and all-reduces against bucket size" };
  dot(chart(field, shown), [now.cap, now.step], `step ${short(now.step)}`, W);
  make("p.lk-small", field, {}, "solid: the step; dashed: all all-reduces");
}

const inKiB = size => String(+(size / 1024).toPrecision(4));

function tellBuckets({ now, best }, { ranks }) {
  const faster = best.step < now.step * (1 - 1e-9);
  const fastest = ` The fastest here is ${inKiB(best.cap)} KiB: ${short(best.step)}.`;
  const head = `On ${ranks} ranks, buckets of ${inKiB(now.cap)} KiB make ${num(now.buckets, "all-reduce")}: `;
  const last = faster ? fastest : " No other size here is faster.";
  const how = `: backward ${short(now.compute)}, all-reduces ${short(now.network)}, ${outside(now)}.${last}`;
  return [
    ["", head],
    [`the step takes ${short(now.step)}`, how],
  ];
}

const NO_BUCKETS = "This recording has no all-reduces of buckets: record a DDP model's backward.";

/** A reader's recording above the same backward, whose buckets are all-reduced on the links that are chosen. */
function recordedBuckets(parent, W, trace, { latency_s, bandwidth_bytes_per_s }) {
  const isSent = ({ kind }) => kind === "collective";
  const shown = e => e.kind === "compute" || (isSent(e) && e.bucket !== undefined);
  const { n, events } = lasting(trace, shown, NO_BUCKETS, isSent);
  const computed = events.filter(e => !isSent(e)).map(e => ({ ...e, lane: 2 * e.lane, kind: "B", text: "" }));
  const yours = events.filter(isSent).map(e => ({ ...e, lane: 2 * e.lane + 1, kind: "W", text: e.bucket }));
  const link = new Link(latency_s, bandwidth_bytes_per_s);
  const ready = bucket => max(0, ...computed.filter(e => e.bucket === bucket).map(({ end }) => end));
  const buckets = [...new Map(yours.map(e => [e.bucket, [ready(e.bucket), e]])).values()];
  let free = 0;
  const sent = buckets.sort(([a], [b]) => a - b).flatMap(([full, { num_bytes, text }]) => {
    const start = max(full, free);
    free = start + ring_all_reduce_s(n, num_bytes, link);
    return range(n, r => ({ lane: 2 * r + 1, kind: "W", start, end: free, text }));
  });
  const names = range(2 * n, i => (i % 2 ? "network" : `rank ${i / 2}`));
  const both = [["your recording", [...computed, ...yours]], ["on these links", [...computed, ...sent]]];
  const kinds = ["backward", "all-reduce"].map((words, i) => ["BW"[i], words, "\u00a0"]);
  const [took, ideal] = drawBoth(parent, W, names, kinds, both);
  return [
    ["", ` Your recording: ${num(n, "rank")}, ${num(buckets.length, "bucket")}, `],
    [short(took), `; with its all-reduces on these links, ${short(ideal)}.`],
  ];
}

explorer("bucket_explorer", {
  ...{ answer: bucketed, draw: drawBuckets, tell: tellBuckets, beside: recordedBuckets },
  told: ({ now }) => ({ length: now.step, buckets: now.buckets }),
});

// # sharded state
function sharded({ stage, ranks, prefetch, latency_s, bandwidth_bytes_per_s }, { unit, num_units, forward_s, each }) {
  const link = new Link(latency_s, bandwidth_bytes_per_s);
  const run = zero => {
    const size = each.parameters * unit;
    const tasks = streams.sharded_step(zero, ranks, num_units, size, forward_s, link, prefetch === "on");
    const step = timed(tasks);
    const kept = sum(plan_bytes.state_bytes(unit * num_units, zero, ranks, each));
    return { zero, ...step, kept, extra: streams.gathered_bytes(tasks, step.times, zero, ranks, size) };
  };
  const all = range(4, run);
  return { all, now: all[stage] };
}

function drawSharded(field, W, { all, now }) {
  drawStreams(field, W, now);
  const both = make("div.lk-pair", field);
  const wide = W < 560 ? W : (W - 20) / 2;
  const row = (one, parts, text) => ({ label: `stage ${one.zero}`, parts, text, best: one === now });
  for (const [title, rows] of [
    ["one step", all.map(one => row(one, timeOf(one), short(one.step)))],
    ["held by each rank", all.map(one => row(one, [[one.kept, HUE.kept], [one.extra, HUE.rest]], inBytes(one)))],
  ]) {
    const box = make("div", both);
    make("p.lk-small", box, {}, title);
    bars(box, wide, rows, 64);
  }
}

const HUE = { compute: "var(--kB)", kept: "var(--kF)", rest: "var(--kI)" };
const timeOf = ({ compute, step }) => [
  [compute, HUE.compute],
  [step - compute, HUE.rest],
];
const inBytes = ({ kept, extra }) => trim(bytes(kept + extra));

function tellSharded({ all, now }, { ranks, prefetch, stage }) {
  const plain = all[0];
  const how = stage === 3 ? (prefetch === "on" ? ", prefetching" : ", without prefetching") : "";
  const slower = now.step / plain.step;
  const than = stage ? `, ${slower.toPrecision(3)} times stage 0` : "";
  const free = now.extra ? `, of which ${trim(bytes(now.extra))} only while a layer is gathered or reduced` : "";
  return [
    ["", `Stage ${stage} on ${num(ranks, "rank")}${how}: `],
    [`a step takes ${short(now.step)}`, `${than}; ${outside(now)}. Each rank holds ${inBytes(now)}${free}.`],
  ];
}

explorer("sharding_explorer", {
  ...{ answer: sharded, draw: drawSharded, tell: tellSharded },
  told: ({ now }) => ({ length: now.step, kept: now.kept, extra: now.extra }),
});

// # the load of experts
/** What each expert gets, in equal shares: as expert_loads of step_explorers.py has it. */
function expertLoads(num_experts, top_k, skew) {
  const weights = range(num_experts, j => skew ** (-j / (num_experts - 1)));
  const first = weights.map(weight => weight / sum(weights));
  if (top_k === 1) return first.map(share => num_experts * share);
  const odds = sum(first, share => share / (1 - share));
  return first.map(share => (num_experts / 2) * share * (1 + odds - share / (1 - share)));
}

function loaded({ experts, top_k, skew, factor }) {
  const loads = expertLoads(experts, top_k, skew);
  const places = factor === "as needed" ? Infinity : +factor;
  const all = loads.map(load => ({ kept: min(load, places), lost: max(load - places, 0) }));
  return { all, busiest: max(...all.map(({ kept }) => kept)), dropped: sum(all, ({ lost }) => lost) / experts };
}

function drawLoads(field, W, { all, busiest }) {
  const row = ({ kept, lost }, j) => {
    const parts = [[kept, HUE.compute], [lost, HUE.rest]];
    return { label: `expert ${j}`, parts, text: (kept + lost).toFixed(2), best: kept === busiest && !j };
  };
  bars(field, W, all.map(row), 76);
  const legend = make("div.lk-keys lk-small", field);
  swatch(legend, HUE.compute, "works on", "");
  swatch(legend, HUE.rest, "dropped", "");
  make("span", legend, {}, "in equal shares");
}

function tellLoads({ all, busiest, dropped }, { experts, factor }) {
  const wanted = all[0].kept + all[0].lost;
  const work = sum(all, ({ kept }) => kept) / experts;
  const idle = percent(1 - work / busiest);
  const lost = factor === "as needed" ? "Nothing is dropped" : `${percent(dropped)} of all choices are dropped`;
  return [
    ["", `The most popular of ${experts} experts is wanted ${wanted.toFixed(2)} times as often as in an equal share: `],
    [`the layer takes ${busiest.toFixed(2)} times as long`, ` as an even one, and a GPU idles ${idle} of it. ${lost}.`],
  ];
}

explorer("load_explorer", {
  ...{ answer: loaded, draw: drawLoads, tell: tellLoads },
  told: ({ busiest, dropped }) => ({ busiest, dropped }),
  source: "computed in this page",
});
