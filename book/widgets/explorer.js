/* Lockstep's explorers: dials that the reader turns, a picture and a sentence that answer. What they show is simulated
   in the page, by the twin. explorer.py says what the data mean.

   What a kind of explorer provides:
     answer(chosen, data)             what the picture and the words are made of; chosen: the value of each dial, by key
     draw(field, W, answer, chosen, data)
     tell(answer, chosen)             the sentences below the picture
     figures(answer, chosen)          pairs for the row of figures
     refine(chosen, dials)            changes values that do not go together, before all that
     told(answer)                     what the root's data attributes say, besides the chosen values
     source, numFigures               words at the top; how many pairs there are: 5 */
(() => {
  const { range, make, bytes, short, footer, frame, watchWidth, pill, write, reserve } = globalThis.lockstepScene;
  const { SHARED, cluster, choose, nearest, listen } = globalThis.lockstepCluster;
  const { min, max, ceil, floor, log, log10, abs } = Math;

  const trim = text => text.replace(/(\.\d*[1-9])0+ |\.0+ /, "$1 ");
  /** A value in words, by its dial's unit; any other unit follows the value. */
  const UNITS = {
    "": String,
    word: String,
    B: x => trim(bytes(x)),
    s: short,
    "B/s": x => trim(bytes(x)) + "/s",
    x: x => (x === 1 ? "no" : `${x} times`),
  };

  // # dials
  /** A slider for the values of a dial, and the chosen one in words. */
  function slider(parent, { label, unit, values }, at, act) {
    const box = make("label.lk-dial", parent);
    make("span", box, {}, label);
    const input = make("input", box, { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": label });
    const words = make("output", box);
    const set = i => {
      input.value = i;
      words.textContent = UNITS[unit]?.(values[i]) ?? `${values[i]} ${unit}`;
      input.setAttribute("aria-valuetext", words.textContent);
    };
    input.oninput = () => act(+input.value);
    set(at);
    return set;
  }

  /** Buttons for a dial of words, one of which is pressed. */
  function buttons(parent, { label, values }, at, act) {
    const box = make("div.lk-dial lk-words", parent, { role: "group", "aria-label": label });
    make("span", box, {}, label);
    const all = values.map((word, i) => pill(make("span", box), word, word, () => act(i)));
    const set = at => {
      all.forEach((b, i) => {
        b.classList.toggle("on", i === at);
        b.setAttribute("aria-pressed", i === at);
      });
    };
    set(at);
    return set;
  }

  // # widget
  function mountExplorer(el, data, opts, kind) {
    const { root, source, caption, alert } = frame(el, data.title, -1);
    source.textContent = kind.source ?? "simulated in this page";
    const bar = make("div.lk-dials", root, { role: "group", "aria-label": "What is simulated" });
    const field = make("div.lk-field", root);
    field.after(caption);
    const foot = footer(root, kind.numFigures ?? 5);
    const first = data.dials.map(dial => dial.at);
    const at = [...first];
    const shared = data.dials.map(({ key }, i) => [key, i]).filter(([key]) => SHARED.includes(key));
    const sets = data.dials.map((dial, i) => {
      return (dial.unit === "word" ? buttons : slider)(bar, dial, at[i], place => turn(i, place));
    });
    const reset = pill(bar, "Reset", "Back to the numbers of the text", () => {
      at.splice(0, at.length, ...first);
      draw();
      choose(null, follow);
    });

    const valuesAt = places => Object.fromEntries(data.dials.map((dial, i) => [dial.key, dial.values[places[i]]]));
    function turn(i, place) {
      at[i] = place;
      draw();
      const chosen = valuesAt(at);
      if (SHARED.includes(data.dials[i].key)) choose({ [data.dials[i].key]: chosen[data.dials[i].key] }, follow);
    }
    /** Take over the cluster that the address has; what it does not name is as the text has it. */
    function follow() {
      const values = cluster();
      for (const [key, i] of shared) at[i] = key in values ? nearest(data.dials[i].values, values[key]) : first[i];
      draw();
    }
    function draw() {
      kind.refine?.(at, data.dials);
      at.forEach((place, i) => sets[i](place));
      const chosen = valuesAt(at);
      const answer = kind.answer(chosen, data);
      const told = kind.tell(answer, chosen, data);
      field.replaceChildren();
      kind.draw(field, field.clientWidth || 320, answer, chosen, data);
      write(caption, told);
      foot(kind.figures(answer, chosen, data));
      reset.disabled = at.every((place, i) => place === first[i]);
      Object.assign(root.dataset, { step: 0, steps: 0, playing: false, ...chosen, ...kind.told?.(answer) });
    }
    const watch = watchWidth(field, draw);
    root.onkeydown = e => e.stopPropagation(); // keys act here and never reach the notebook around it
    const end = listen(follow);
    follow();
    reserve(caption, [kind.tell(kind.answer(valuesAt(at), data), valuesAt(at), data)]);
    const destroy = () => {
      end();
      watch.disconnect();
      root.remove();
    };
    return { root, alert, state: { playing: false, stops: () => [0] }, control: { go() {}, end: () => 0 }, destroy };
  }

  // # chart
  /** Powers of ten from low to high, at most so many. */
  function tens(low, high, most) {
    const [from, to] = [ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9)];
    const every = ceil((to - from + 1) / most);
    return range(floor((to - from) / every) + 1, i => 10 ** (from + i * every));
  }

  /** Where a value is on an axis, from 0 to 1. */
  const place = (x, { low, high, tens }) => (tens ? log(x / low) / log(high / low) : (x - low) / (high - low));

  /**
   * Curves in a frame. axes: { x, y }, each { low, high, ticks, text(tick), label, tens: whether it is logarithmic };
   * curves: { points, hue, dash }; now: a value of x to mark. Returns the layer, and where points are.
   */
  function chart(parent, { W, H, axes: { x, y }, curves, now, name }) {
    const [left, right, top, bottom] = [46, W - 10, 12, H - 34];
    const X = v => left + place(v, x) * (right - left);
    const Y = v => bottom - place(v, y) * (bottom - top - 6);
    const g = make("svg", make("div.lk-stage", parent, { style: `width:${W}px;height:${H}px` }), {
      ...{ width: W, height: H, role: "img", "aria-label": name },
    });
    make("path.lk-edge", g, { d: `M${left} ${top}V${bottom}H${right}`, fill: "none" });
    for (const tick of x.ticks) {
      make("path.lk-stripe", g, { d: `M${X(tick)} ${bottom}v4` });
      const side = X(tick) > right - 24 ? "end" : "middle";
      make("text.lk-tiny", g, { x: X(tick), y: bottom + 15, "text-anchor": side }, x.text(tick));
    }
    for (const tick of y.ticks) {
      make("text.lk-tiny", g, { x: left - 6, y: Y(tick) + 4, "text-anchor": "end" }, y.text(tick));
    }
    make("text.lk-tiny", g, { x: right, y: H - 4, "text-anchor": "end" }, x.label);
    make("text.lk-tiny", g, { x: 2, y: top - 6 }, y.label);
    make("path.lk-nowline", g, { d: `M${X(now)} ${top}V${bottom}` });
    const inside = v => max(top, min(bottom, Y(v)));
    for (const { points, hue, dash = "" } of curves) {
      const d = points.map(([a, b], i) => `${i ? "L" : "M"}${X(a).toFixed(1)} ${inside(b).toFixed(1)}`).join("");
      make("path.lk-curve", g, { d, style: `stroke:${hue}`, "stroke-dasharray": dash });
    }
    return { g, X, Y };
  }

  /** A dot on a chart, with words beside it. */
  function dot({ g, X, Y }, [a, b], words, W, down = -9) {
    make("circle.lk-spotted", g, { cx: X(a), cy: Y(b), r: 4, fill: "var(--ink)" });
    const room = words.length * 6.3 + 10;
    const side = X(a) + room < W ? "start" : "end";
    const at = { x: X(a) + (side === "start" ? 8 : -8), y: Y(b) + down, "text-anchor": side };
    make("text.lk-outlined", g, at, words);
  }

  /** Between two points on a straight line. */
  const between = ([a, s], [c, t], x) => s + ((t - s) * (x - a)) / (c - a || 1);

  /**
   * Points of f from a to c, on a logarithmic axis, between which it is a straight line. What a simulation takes is one
   * or a few of them, and there is no need to simulate more.
   */
  function pieces(f, a, c, deep = 6) {
    const split = (from, to, left) => {
      const x = Math.sqrt(from[0] * to[0]);
      const at = [x, f(x)];
      const straight = abs(between(from, to, x) - at[1]) <= 1e-9 * abs(at[1]);
      return straight || !left ? [] : [...split(from, at, left - 1), at, ...split(at, to, left - 1)];
    };
    const [from, to] = [a, c].map(x => [x, f(x)]);
    return [from, ...split(from, to, deep), to];
  }

  /** The value at x of what such points stand for. */
  function valueAt(points, x) {
    const i = max(1, points.findIndex(([at]) => at >= x));
    return between(points[i - 1], points[i], x);
  }

  /** Where f changes its sign between a and c; f is a few straight lines, so that few steps find it. */
  function zero(f, a, c) {
    let [fa, fc] = [f(a), f(c)];
    for (let i = 0; i < 40 && c - a > 1e-6 * c; i++) {
      const b = i % 3 === 2 ? (a + c) / 2 : a - (fa * (c - a)) / (fc - fa);
      const fb = f(b);
      if (abs(fb) <= 1e-9 * max(abs(fa), abs(fc))) return b;
      if (fb > 0 === fa > 0) [a, fa] = [b, fb];
      else [c, fc] = [b, fb];
    }
    return c;
  }

  globalThis.lockstepExplorer = { mountExplorer, chart, dot, tens, pieces, valueAt, zero, trim };
})();
