/* Lockstep's bars of state by formula: what each rank holds in each ZeRO stage, as the reader chooses. */
(() => {
const { range, clamp, make, canvas, bytes, footer, define } = globalThis.lockstepControls;
const { min, max, ceil, round, log2 } = Math, NAMES = ["parameters", "gradients", "optimizer state"];

const sharded = stage => [3, 2, 1].map(first => stage >= first); // as book.cost.state_bytes has it
const stateBytes = (parameters, stage, ranks, each) => sharded(stage).map((cut, i) => parameters * each[i] / (cut ? ranks : 1));
const total = list => list.reduce((a, b) => a + b, 0);

function fewest(parameters, stage, each, gpu) { // ranks with which a stage fits; Infinity where none do
  const [fixed, cut] = [false, true].map(is => total(each.filter((_, i) => sharded(stage)[i] === is)) * parameters);
  return fixed + cut <= gpu ? 1 : cut && fixed < gpu ? ceil(cut / (gpu - fixed)) : Infinity;
}

function control(parent, text, tag, attrs, act) {
  const e = make(tag, make("label.lk-pill", parent, {}, text + " "), { "aria-label": text, ...attrs });
  e.oninput = () => act(e);
  return e;
}
function select(parent, text, names, at, act) {
  const e = control(parent, text, "select", {}, e => act(+e.value));
  names.forEach((name, i) => make("option", e, { value: i }, name));
  e.value = at;
  return e;
}

function chart(parent, { parameters, stage, ranks, each, gpu }, W, choose) {
  const left = 72, right = 66, top = 24, h = 24, row = 38, H = top + 4 * row, all = range(4, s => stateBytes(parameters, s, ranks, each));
  const scale = (W - left - right) / max(gpu, ...all.map(total)), { rest } = canvas(parent, W, H, { role: "group", "aria-label": NAMES.join(", ") });
  const edge = left + gpu * scale, beside = (x, w) => { // the middle of a bar, or where the GPU's line does not cross its text
    const middle = x + w / 2, near = middle > edge - 30 && middle < edge + 30;
    return near && edge + 62 < x + w ? edge + 32 : near && edge - 62 > x ? edge - 32 : middle;
  };
  all.forEach((list, s) => {
    const y = top + s * row, on = s === stage, sum = total(list), say = `stage ${s}: ${bytes(sum)} on each rank, ${sum > gpu ? "more than" : "fits"} ${bytes(gpu)}`;
    const g = make("g", rest, { role: "button", tabindex: 0, "aria-pressed": on, "aria-label": say, style: "cursor:pointer", "data-stage": s });
    make("rect", g, { x: 1, y: y - 5, width: W - 2, height: h + 10, rx: 6, fill: "transparent", class: on ? "lk-chosen" : "" });
    make("text" + (on ? ".lk-rank" : ""), g, { x: 10, y: y + h / 2 + 4.5 }, "stage " + s);
    let x = left;
    list.forEach((size, i) => {
      const w = size * scale, text = bytes(size);
      make("rect.lk-hold", g, { x, y, width: max(0.6, w), height: h, fill: `var(--m${i})`, stroke: "var(--bg)", "stroke-width": w > 3 ? 1 : 0 });
      if (w > text.length * 6.4 + 6) make("text.lk-in", g, { x: beside(x, w), y: y + h / 2 + 4, "text-anchor": "middle" }, text);
      x += w;
    });
    make("text" + (sum > gpu ? ".lk-limits" : ".lk-out"), g, { x: x + 6 + (sum <= gpu && edge - x < 66 && edge - x > -2 ? edge - x + 2 : 0), y: y + h / 2 + 4, style: "font-weight:600" }, bytes(sum));
    g.onclick = () => choose(s);
    g.onkeydown = e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(s); } };
  });
  make("path.lk-limit", rest, { d: `M${edge.toFixed(1)} ${top - 6}V${H - 4}` });
  make("text", rest, { x: clamp(edge, W - 40), y: 12, "text-anchor": edge > 40 ? "middle" : "start" }, bytes(gpu).replace(".0", "") + " GPU");
}

// # widget
function mountBars(el, data, opts) {
  const chosen = { parameters: data.parameters, ranks: data.ranks, stage: data.stage, each: data.precisions[data.precision][1], gpu: data.gpus[data.gpu] };
  const root = make("div.lockstep-player", el, { role: "group", "aria-label": data.title, tabindex: -1 }), head = make("div.lk-head", root);
  if (matchMedia("(prefers-color-scheme: dark)").matches && !root.closest("[data-jp-theme-light]")) root.classList.add("dark");
  make("b", head, {}, data.title);
  make("span", head, {}, "by formula");
  const caption = make("p.lk-caption", root, { "aria-live": "polite" }), alert = make("p.lk-alert", root, { role: "alert", hidden: "" }), bar = make("div.lk-pickers", root), field = make("div.lk-field", root);
  const parts = make("div.lk-parts lk-small", root), foot = footer(root, 4), set = change => { Object.assign(chosen, change); draw(); };
  NAMES.forEach((name, i) => { const span = make("span", parts); make("i", span, { style: `--c:var(--m${i})` }); span.append(name); });

  const known = data.models.findIndex(([, size]) => size === data.parameters), last = data.models.length;
  const own = control(bar, "billions of parameters", "input", { type: "number", min: 0.001, max: 1e4, step: "any", value: data.parameters / 1e9 }, e => e.value > 0 && set({ parameters: min(1e13, max(1e6, e.value * 1e9)) }));
  const model = select(bar, "model", [...data.models.map(([name]) => name), "your own"], known < 0 ? last : known, i => {
    own.parentNode.hidden = i < last;
    if (i < last) { own.value = data.models[i][1] / 1e9; set({ parameters: data.models[i][1] }); }
  });
  bar.prepend(model.parentNode);
  own.parentNode.hidden = known >= 0;
  const ranks = control(bar, "ranks", "input", { type: "number", min: 1, max: data.most, value: data.ranks }, e => e.value >= 1 && setRanks(min(data.most, round(e.value))));
  const slide = make("input", ranks.parentNode, { type: "range", min: 0, max: log2(data.most), "aria-label": "ranks, by powers of two", value: round(log2(data.ranks)) });
  const setRanks = n => { slide.value = round(log2(n)); set({ ranks: n }); };
  slide.oninput = () => { ranks.value = 2 ** slide.value; set({ ranks: 2 ** slide.value }); };
  const stage = select(bar, "ZeRO stage", range(4), data.stage, s => set({ stage: s }));
  select(bar, "precision", data.precisions.map(([name, each]) => `${each.join("+")} B: ${name}`), data.precision, i => set({ each: data.precisions[i][1] }));
  select(bar, "GPU", data.gpus.map(size => bytes(size).replace(/\.0+ /, " ")), data.gpu, i => set({ gpu: data.gpus[i] }));

  function draw() {
    const { parameters, stage: s, ranks: n, each, gpu } = chosen, list = stateBytes(parameters, s, n, each), sum = total(list), least = fewest(parameters, s, each, gpu), focused = field.contains(document.activeElement);
    field.replaceChildren();
    chart(field, chosen, field.clientWidth || 320, i => { stage.value = i; set({ stage: i }); });
    if (focused) field.querySelector(`[data-stage="${s}"]`).focus();
    caption.replaceChildren(make("b", null, sum > gpu ? { class: "lk-wrong" } : {}, `Stage ${s} on ${n} rank${n > 1 ? "s" : ""}: ${bytes(sum)} on each`), `, ${sum > gpu ? "more than a GPU of" : "which leaves " + bytes(gpu - sum) + " of"} ${bytes(gpu).replace(/\.0+ /, " ")}${sum > gpu ? " has" : " for activations and what is gathered"}: ` + NAMES.map((name, i) => `${bytes(list[i])} of ${name}`).join(", ") + ".");
    foot([[bytes(sum), "on each rank: " + each.map((b, i) => b + (sharded(s)[i] && n > 1 ? "/" + n : "")).join(" + ") + " B a parameter"],
      [n > 1 && s ? `1/${+(total(each) * parameters / sum).toPrecision(3)}` : "all", "of what stage 0 holds"],
      [least === Infinity ? "never" : String(least), least === Infinity ? "fits: what is not sharded is too much" : `rank${least > 1 ? "s" : ""}, and stage ${s} fits`],
      [`${+((s === 3 ? 3 : 2) * (n - 1) / n).toPrecision(3)} n`, `sent by each rank in a step: ${s === 3 ? 3 : 2}(N−1)/N·n, n all parameters`]]);
    Object.assign(root.dataset, { step: 0, steps: 0, playing: false, stage: s, ranks: n, bytes: sum });
  }
  let width = 0;
  const watch = new ResizeObserver(() => { if (field.clientWidth && field.clientWidth !== width) { width = field.clientWidth; draw(); } });
  watch.observe(field);
  root.onkeydown = e => e.stopPropagation(); // keys act here and never reach the notebook around it
  draw();
  return { root, alert, state: { playing: false, stops: () => [0] }, control: { go() {}, end: () => 0, toggle() {} }, destroy() { watch.disconnect(); root.remove(); } };
}

define("memorybars", () => mountBars);
Object.assign(globalThis.lockstepMemorybars, { stateBytes, fewest });
})();
