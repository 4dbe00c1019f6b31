/* Lockstep's pipeline with lengths that the reader chooses: the timeline of a step, and bubble and memory against the
   number of micro-batches. pipeline_explorer.py says what the data mean. A rank's forward of one micro-batch takes 1,
   however many stages it is cut into. */
(() => {
  const { make, range, sum, num, define } = globalThis.lockstepScene;
  const { mountExplorer, chart, dot } = globalThis.lockstepExplorer;
  const { links, pipelines, simulate } = globalThis.lockstepTwin;
  const { min, max, abs, floor, round } = Math;
  const KINDS = ["F", "B", "I", "W"];
  const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
  const LABELLED = 15; // px of a block that has room for its number

  // # simulation
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
    const wire = link ? new links.Link(link, 1) : null;
    const times = simulate.actionTimes(order, 1 / per_rank, ratio / per_rank, null, wire);
    const step = times.reduce((last, { end_s }) => max(last, end_s), 0);
    const peaks = order.peak_in_flight().map(count => count / per_rank);
    return { batches, times, step, bubble: 1 - (batches * (1 + ratio)) / step, peaks, peak: max(...peaks) };
  }

  /** The step that is chosen, and others with more and fewer micro-batches. */
  function answer(chosen, data) {
    const { schedule, ranks, batches } = chosen;
    const most = data.dials.find(dial => dial.key === "batches").values.at(-1);
    const groups = range(floor(most / ranks), i => (i + 1) * ranks);
    const counts = schedule === "interleaved" ? groups : [1, 2, 4, 8, 16, 32];
    const now = run(chosen, batches, data);
    const others = counts.filter(m => m !== batches && m <= most).map(m => run(chosen, m, data));
    return { now, all: [...others, now].sort((a, b) => a.batches - b.batches), most };
  }

  // # picture
  function draw(field, W, { now, all, most }, { ranks, per_rank }) {
    timeline(field, W, now, ranks, per_rank);
    const both = make("div.lk-pair", field);
    const wide = W < 560 ? W : (W - 20) / 2;
    const x = { low: 0, high: most, ticks: range(5, i => (i * most) / 4), text: String, label: "micro-batches" };
    const shape = { H: 150, W: wide, now: now.batches };
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

  const percent = share => `${(100 * share).toFixed(1)} %`;
  const text = x => String(+x.toPrecision(3));
  function evenly(top) {
    const step = [1, 2, 4, 5, 8, 10].find(s => top / s <= 5) ?? 10;
    return range(floor(top / step) + 1, i => i * step);
  }

  /** A lane for each rank; all blocks of a kind are one path, as there may be thousands. */
  function timeline(field, W, { times, step }, ranks, per_rank) {
    const tight = ranks > 8;
    const [left, lane, gap] = [W < 560 ? 26 : 52, tight ? 13 : 20, tight ? 3 : 5];
    const H = ranks * (lane + gap) + 8;
    const box = make("div.lk-stage", field, { style: `width:${W}px;height:${H}px` });
    const g = make("svg", box, { width: W, height: H, role: "img", "aria-label": `timeline of ${num(ranks, "rank")}` });
    const scale = (W - left - 2) / (step || 1);
    const at = r => 4 + r * (lane + gap);
    const parts = Object.fromEntries(KINDS.map(name => [name, []]));
    const words = [];
    for (const { action, start_s, end_s } of times) {
      const { rank, kind, stage, micro_batch } = action;
      const [x, w, y] = [left + start_s * scale, (end_s - start_s) * scale, at(rank)];
      const wide = max(0.3, w - (w > 3 ? 1 : 0.2)).toFixed(1);
      parts[kind].push(`M${x.toFixed(1)} ${y}h${wide}v${lane}h-${wide}z`);
      if (w < LABELLED || tight) continue;
      const marked = stage >= ranks ? ' style="text-decoration:underline"' : "";
      const where = `x="${(x + w / 2).toFixed(1)}" y="${y + lane / 2 + 4}" text-anchor="middle"`;
      words.push(`<text class="lk-${kind === "W" ? "out" : "in"}" ${where}${marked}>${micro_batch}</text>`);
    }
    const size = `width="${W - left}" height="${lane}"`;
    const lanes = range(ranks, r => `<rect class="lk-idle" x="${left}" y="${at(r)}" ${size}/>`);
    const blocks = KINDS.map(name => `<path d="${parts[name].join("")}" style="fill:var(--k${name})"/>`);
    const names = range(ranks, r => {
      return `<text class="lk-tiny" x="0" y="${at(r) + lane / 2 + 4}">${W < 560 ? "" : "rank "}${r}</text>`;
    });
    g.innerHTML = [...lanes, ...blocks, ...words, ...names].join("");
    legend(field, KINDS.filter(name => parts[name].length), per_rank);
  }

  function legend(field, kinds, per_rank) {
    const row = make("div.lk-key lk-small", field);
    for (const [look, mark, words] of [...kinds.map(kind => [kind, kind, NAMES[kind]]), ["idle", "\u00a0", "idle"]]) {
      const one = make("span", row);
      make(`i.k${look}`, one, { style: `--c:var(--k${look})` }, mark);
      one.append(words);
    }
    if (per_rank > 1) make("span", row, {}, "underlined: a further stage of the rank");
  }

  // # words
  const FORMS = { GPipe: "(p−1)/(m+p−1)", "1F1B": "(p−1)/(m+p−1)", interleaved: "(p−1)/(vm+p−1)" };

  /** The bubble beside its closed form, which takes equal stages and messages that take no time. */
  function beside({ bubble }, { schedule, ranks, batches, per_rank, link }) {
    const form = links.pipeline_bubble(ranks, batches, schedule === "ZB-V" ? 1 : per_rank);
    if (schedule === "ZB-V") return `; 1F1B's would be ${percent(form)}`;
    if (abs(form - bubble) < 1e-9) return `, as ${FORMS[schedule]} says`;
    return `; ${FORMS[schedule]} says ${percent(form)}${link ? ", for messages that take no time" : ""}`;
  }

  function tell({ now }, chosen) {
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

  function figures({ now }, { ranks, batches, ratio }) {
    return [
      [text(now.step), "forwards of one rank: the step"],
      [percent(now.bubble), "bubble: idle share of the step"],
      [text(batches * (1 + ratio)), "forwards: what each rank computes"],
      [text(now.peak), "micro-batches held at most, by the fullest rank"],
      [text(sum(now.peaks) / ranks), "on average over the ranks"],
    ];
  }

  const told = ({ now }) => ({ length: now.step, bubble: now.bubble, peak: now.peak });
  const kind = { answer, draw, tell, figures, refine, told };
  define("pipeline_explorer", () => (el, data, opts) => mountExplorer(el, data, opts, kind));
  globalThis.lockstepPipeline_explorer.answer = answer;
})();
