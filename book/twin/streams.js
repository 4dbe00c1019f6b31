/* The twin of book/simulate/streams.py: a training step on two streams, what a GPU computes and what its network
   carries meanwhile. */
import { ring_all_gather_s, ring_all_reduce_s } from "./links.js";

/** @typedef {{stream: string, op: string, unit: number, duration_s: number, needs: number[]}} Task */

/**
 * When each task starts and ends.
 * @param {Task[]} tasks
 * @returns {[number, number][]}
 */
function stream_times(tasks) {
  const free = {};
  const times = [];
  for (const { stream, needs, duration_s } of tasks) {
    const start = Math.max(free[stream] ?? 0, ...needs.map(i => times[i][1]));
    free[stream] = start + duration_s;
    times.push([start, free[stream]]);
  }
  return times;
}

/**
 * The places of gradients in each bucket, which closes when it has `cap_bytes` or more.
 * @param {number[]} gradient_bytes
 * @param {number} cap_bytes
 * @returns {number[][]}
 */
function fill_buckets(gradient_bytes, cap_bytes) {
  const buckets = [[]];
  let filled = 0;
  gradient_bytes.forEach((num_bytes, i) => {
    if (filled >= cap_bytes) {
      buckets.push([]);
      filled = 0;
    }
    buckets.at(-1).push(i);
    filled += num_bytes;
  });
  return buckets.filter(bucket => bucket.length);
}

/**
 * A backward pass whose gradients are all-reduced in buckets on a ring, each when it is full.
 * @param {number[]} gradient_bytes
 * @param {number} cap_bytes
 * @param {number} world_size
 * @param {number} s_per_byte
 * @param {Link} link
 * @returns {Task[]}
 */
function bucketed_backward(gradient_bytes, cap_bytes, world_size, s_per_byte, link) {
  const computed = gradient_bytes.map((num_bytes, unit) => {
    return { stream: "compute", op: "backward", unit, duration_s: num_bytes * s_per_byte, needs: [] };
  });
  const sent = fill_buckets(gradient_bytes, cap_bytes).map((bucket, unit) => {
    const num_bytes = bucket.reduce((all, i) => all + gradient_bytes[i], 0);
    const duration_s = ring_all_reduce_s(world_size, num_bytes, link);
    return { stream: "network", op: "all_reduce", unit, duration_s, needs: [bucket.at(-1)] };
  });
  return [...computed, ...sent];
}

/**
 * Forward and backward of equal units with sharded state, without the update, which takes no time here.
 * @param {number} zero_stage
 * @param {number} num_shards
 * @param {number} num_units
 * @param {number} unit_bytes
 * @param {number} forward_s
 * @param {Link} link
 * @param {boolean} prefetch
 * @returns {Task[]}
 */
function sharded_step(zero_stage, num_shards, num_units, unit_bytes, forward_s, link, prefetch = true) {
  const [gather_s, reduce_s] = [ring_all_gather_s, ring_all_reduce_s].map(form => form(num_shards, unit_bytes, link));
  const tasks = [];
  const add = (stream, op, unit, duration_s, needs = []) => tasks.push({ stream, op, unit, duration_s, needs }) - 1;
  const units = Array.from({ length: num_units }, (_, unit) => unit);
  const order = [...units.map(unit => ["forward", unit]), ...units.map(u => ["backward", u]).reverse()];
  const gathered = {};
  const computed = [];
  const gather = place => {
    if (zero_stage < 3 || place >= order.length || place in gathered) return;
    const behind = prefetch ? place - 2 : place - 1;
    gathered[place] = add("network", "all_gather", order[place][1], gather_s, behind < 0 ? [] : [computed[behind]]);
  };
  order.forEach(([op, unit], place) => {
    gather(place);
    if (prefetch) gather(place + 1);
    const needs = place in gathered ? [gathered[place]] : [];
    computed.push(add("compute", op, unit, forward_s * (op === "forward" ? 1 : 2), needs));
    if (op !== "backward") return;
    if (zero_stage) add("network", "reduce_scatter", unit, gather_s, [computed.at(-1)]);
    else add("network", "all_reduce", unit, reduce_s, [computed.at(-1)]);
  });
  const last = tasks.length - 1;
  const again = zero_stage === 1 || zero_stage === 2 ? units : [];
  for (const unit of again) add("network", "all_gather", unit, gather_s, [last]);
  return tasks;
}

/**
 * The most bytes that a rank of `sharded_step` holds for a while beside its shards.
 * @param {Task[]} tasks
 * @param {[number, number][]} times
 * @param {number} zero_stage
 * @param {number} num_shards
 * @param {number} unit_bytes
 * @returns {number}
 */
function gathered_bytes(tasks, times, zero_stage, num_shards, unit_bytes) {
  const spans = [];
  const [parameters, gradients] = [{}, {}]; // of each unit, the starts of what has not ended, in their order
  const open = (of, unit, start) => (of[unit] ??= []).push(start);
  tasks.forEach(({ stream, op, unit }, i) => {
    const [start, end] = times[i];
    if (zero_stage === 3 && op === "all_gather") open(parameters, unit, start);
    if (zero_stage === 3 && stream === "compute") spans.push([parameters[unit].shift(), end]);
    if (zero_stage >= 2 && op === "backward") open(gradients, unit, start);
    if (zero_stage >= 2 && op === "reduce_scatter") spans.push([gradients[unit].shift(), end]);
  });
  const held = spans.map(([at]) => spans.filter(([start, end]) => start <= at && at < end).length);
  return unit_bytes * (1 - 1 / num_shards) * Math.max(0, ...held);
}

export { stream_times, bucketed_backward, sharded_step, gathered_bytes };
