/* Lanes of Lockstep's timelines: blocks on a common clock, hollow before it comes to them and solid after. */
(() => {
const { make, canvas, seconds } = globalThis.lockstepControls, { max, floor, log10 } = Math, TICKS = 1e5; // in a run's duration

let hatches = 0;
const fit = (texts, room) => texts.find(text => text.length * 6.3 <= room); // the first that has room at 11 px: long ones first

/* rows: { y, h, blocks }, a block { a, b, c, key, lines, kind, look, marks, pad }: from tick a to b, in colour c, known as
   data-b=key, with lines of text to choose from by length, which leave pad pixels, the class look, and so many lines along
   its top; one that has a kind (a class) is not drawn before its time. */
function lanes(parent, { W, H, left, perTick, rows, name }) {
  const { rest, move } = canvas(parent, W, H, { role: "group", "aria-label": name }), x = t => left + t * perTick, id = "lk-hatch" + hatches++;
  const hatch = make("pattern", make("defs", rest), { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  make("rect.lk-idle", hatch, { width: 6, height: 6 });
  make("path.lk-stripe", hatch, { d: "M0 0V6" });
  const now = make("div.lk-now", rest.parentNode, { style: `height:${H}px` });
  for (const { y, h, blocks } of rows) {
    make("i", now, { style: `top:${y - 5}px;height:${h + 10}px` });
    make("rect", rest, { x: left, y, width: TICKS * perTick, height: h, rx: 4, fill: `url(#${id})` });
    for (const block of blocks) for (const layer of block.kind ? [move] : [rest, move]) drawBlock(layer, block, x, y, h);
  }
  return { rest, move, x, set(t) {
    now.style.transform = `translateX(${x(t).toFixed(1)}px)`;
    move.style.clipPath = `inset(-9px ${(W - x(t)).toFixed(1)}px -9px 0)`;
  } };
}

function drawBlock(layer, { a, b, c, key, lines, kind = "", look = "", marks = 0, pad = 7 }, x, y, h) {
  const w = x(b) - x(a), thin = w < 4, g = make(`g.lk-block ${kind}${look}${thin ? " thin" : ""}`, layer, { style: `--c:${c}`, "data-b": key });
  make("rect", g, { x: x(a) + (thin ? 0 : 0.7), y, width: max(1, w - (thin ? 0.3 : 1.4)), height: h, rx: thin ? 0 : 3 });
  const texts = lines.map(list => fit(list, w - pad)).filter(Boolean), top = y + h / 2 + 10 - 6 * texts.length;
  for (let i = 0; i < marks; i++) make("path", g, { d: `M${x(a) + 2} ${y + 2.5 + 2.5 * i}h${max(0, w - 4)}` });
  texts.forEach((text, i) => make("text", g, { x: x(a) + w / 2, y: top + 12 * i, "text-anchor": "middle" }, text));
}

function axis(ui, { W, y }, duration_s, total_s) { // times below the lanes
  const least = total_s / (W > 560 ? 7 : 4), ten = 10 ** floor(log10(least)), step = ten * [1, 2, 5, 10].find(f => f * ten >= least);
  for (let k = 0, x; (x = ui.x(k * step / duration_s * TICKS)) < W - 18; k++) {
    make("path.lk-stripe", ui.rest, { d: `M${x} ${y}v4` });
    make("text.lk-tiny", ui.rest, { x, y: y + 15, "text-anchor": k ? "middle" : "start" }, k ? seconds(k * step).replace(/(\.\d*[1-9])0+ |\.0+ /, "$1 ") : 0);
  }
}

globalThis.lockstepLanes = { TICKS, fit, lanes, axis };
})();
