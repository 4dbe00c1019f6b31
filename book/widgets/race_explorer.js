/* Lockstep's race on links that the reader chooses: the time of each algorithm at one size, and their curves against
   size, where two cross. race_explorer.py says what the data mean. */
(() => {
  const { range, make, bytes, short, rect, define } = globalThis.lockstepScene;
  const { mountExplorer, chart, dot, tens, pieces, valueAt, zero, trim } = globalThis.lockstepExplorer;
  const { collectives, links, simulate } = globalThis.lockstepTwin;
  const { min, max } = Math;
  const HUES = ["var(--x1)", "var(--x2)", "var(--x0)", "var(--x3)"];
  const DASHES = ["2 3", "7 4", "", "10 3 2 3"];
  const [SMALLEST, LARGEST] = [1e3, 1e10];
  const SIZES = range(71, i => 10 ** (3 + i / 10)); // of the points of a curve

  // # simulation
  const schedules = new Map();
  /** A schedule is made once: only the links differ from one turn of a dial to the next. */
  function scheduleOf(name, ranks) {
    const key = `${name} ${ranks}`;
    if (!schedules.has(key)) schedules.set(key, collectives.COLLECTIVES[name].schedule(ranks));
    return schedules.get(key);
  }

  /** The links of all ranks, and those that are slow. */
  function network({ latency_s, bandwidth_bytes_per_s, slow_link, slow_rank }) {
    const slow = new links.Link(latency_s, bandwidth_bytes_per_s / slow_link);
    const pairs = [
      [0, 1],
      [1, 0],
    ];
    return {
      link: new links.Link(latency_s, bandwidth_bytes_per_s),
      links: slow_link > 1 ? pairs.map(pair => [...pair, slow]) : [],
      slowdown: { 1: slow_rank },
    };
  }

  /** Times of each algorithm: now, and against size; and the size from which on the ring is faster than the tree. */
  function answer(chosen, data) {
    const { link, ...options } = network(chosen);
    const runs = data.algorithms.map(([label, name], i) => {
      const schedule = scheduleOf(name, chosen.ranks);
      const time = num_bytes => simulate.durationOf(schedule, num_bytes, link, options);
      return { label, name, i, time, points: pieces(time, SMALLEST, LARGEST), now: time(chosen.num_bytes) };
    });
    const order = [...runs].sort((a, b) => a.now - b.now);
    return { runs, order, even: crossing(runs.find(isRing), runs.find(isTree)) };
  }

  const isRing = ({ name }) => name === "ring_all_reduce";
  const isTree = ({ name }) => name === "tree_all_reduce";

  /** The size at which two algorithms take the same time; null where one is faster at all sizes. */
  function crossing(a, b) {
    const ahead = SIZES.map(size => valueAt(a.points, size) < valueAt(b.points, size));
    const i = ahead.findIndex((is, k) => k && is !== ahead[k - 1]);
    return i < 0 ? null : zero(size => a.time(size) - b.time(size), SIZES[i - 1], SIZES[i]);
  }

  // # picture
  function draw(field, W, { runs, order, even }, { num_bytes }) {
    bars(field, W, runs, order);
    const times = runs.flatMap(run => run.points.map(([, s]) => s));
    const [low, high] = [min(...times), max(...times)];
    const axes = {
      x: axis(SMALLEST, LARGEST, W < 560 ? 4 : 8, size => trim(bytes(size)), "size of the buffer"),
      y: axis(low / 4, high * 1.3, 6, short, "time"),
    };
    const curves = runs.map(({ i, points }) => {
      return { points: SIZES.map(size => [size, valueAt(points, size)]), hue: HUES[i], dash: DASHES[i] };
    });
    const name = `time against size of ${runs.map(run => run.label).join(", ")}`;
    const set = chart(field, { W, H: 180, axes, curves, now: num_bytes, name });
    if (even) dot(set, [even, runs.find(isRing).time(even)], `n* = ${trim(bytes(even))}`, W, 16);
  }

  const axis = (low, high, most, text, label) => ({ low, high, tens: true, ticks: tens(low, high, most), text, label });

  /** A bar for each algorithm. */
  function bars(field, W, runs, order) {
    const [left, row, right] = [142, 22, 62];
    const H = runs.length * row + 12;
    const box = make("div.lk-stage", field, { style: `width:${W}px;height:${H}px` });
    const g = make("svg", box, { width: W, height: H, "aria-hidden": true });
    const scale = (W - left - right) / max(...runs.map(run => run.now), 1e-300);
    const looks = i => `rx="3" style="fill:${HUES[i]}"`;
    const marks = runs.map(({ i, now }) => rect([left, i * row + 4, now * scale, 14], looks(i)));
    g.innerHTML = marks.join("");
    for (const run of runs) {
      const { i, now, label } = run;
      const y = i * row + 16;
      const best = run === order[0];
      make("path.lk-curve", g, { d: `M0 ${y - 4}h18`, style: `stroke:${HUES[i]}`, "stroke-dasharray": DASHES[i] });
      make("text" + (best ? ".done" : ""), g, { x: 24, y }, label);
      make("text" + (best ? ".done" : ""), g, { x: left + now * scale + 6, y }, short(now));
    }
  }

  // # words
  function tell({ order, even, runs }, { ranks, num_bytes, slow_link, slow_rank }) {
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

  function figures({ runs }, { ranks, num_bytes }) {
    return runs.map(({ label, name, now }) => {
      const sent = max(...scheduleOf(name, ranks).sent_bytes(num_bytes));
      const speed = trim(bytes(num_bytes / (now || Infinity)));
      return [trim(bytes(sent)), `sent by the busiest rank, ${label}: ${speed}/s of the buffer`];
    });
  }

  const told = ({ even, order }) => ({ even: even ?? "", fastest: order[0].name });
  const kind = { answer, draw, tell, figures, told };
  define("race_explorer", () => (el, data, opts) => mountExplorer(el, data, opts, kind));
  globalThis.lockstepRace_explorer.answer = answer;
})();
