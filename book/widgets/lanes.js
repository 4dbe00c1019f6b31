/* Lanes: blocks on a common clock, hollow before it comes to them and solid after.

   @typedef {object} Block
   @property {number} a, b         from which tick to which
   @property {string} c            its colour
   @property {number} key          what it belongs to, its data-b
   @property {string[][]} lines    of each line of text what may stand there, long ones first
   @property {number} [played]     to which tick once it is played, if not b
   @property {string} [kind]       a class of one that is not drawn before its time
   @property {string} [look]       a class of any other
   @property {number} [marks]      so many lines along its top
   @property {number} [pad]        pixels that its text leaves free */
import { canvas, make, seconds, short, byStops } from "./scene.js";

const { max, floor, log10 } = Math;
const TICKS = 1e5; // in a run's duration

let hatches = 0;
/** The first text that has room at 12 px: long ones first. */
const fit = (texts, room) => texts.find(text => text.length * 7 <= room);

/** Draw rows of blocks, { y, h, blocks }; returns the layers, where a tick is, and set(t). */
function lanes(parent, { W, H, left, perTick, rows, name }) {
  const { rest, move } = canvas(parent, W, H, { role: "group", "aria-label": name });
  const x = t => left + t * perTick;
  const id = "lk-hatch" + hatches++;
  const size = { width: 6, height: 6 };
  const turned = { patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const hatch = make("pattern", make("defs", rest), { id, ...size, ...turned });
  make("rect.lk-idle", hatch, size);
  make("path.lk-stripe", hatch, { d: "M0 0V6" });
  const now = make("div.lk-now", rest.parentNode);
  for (const { y, h, blocks } of rows) {
    make("i", now, { style: `top:${y - 5}px;height:${h + 10}px` });
    make("rect", rest, { x: left, y, width: TICKS * perTick, height: h, rx: 4, fill: `url(#${id})` });
    for (const block of blocks) {
      if (!block.kind) drawBlock(rest, block, x, y, h);
      drawBlock(move, { ...block, b: block.played ?? block.b }, x, y, h);
    }
  }
  const set = t => {
    now.style.transform = `translateX(${x(t).toFixed(1)}px)`;
    move.style.clipPath = `inset(-9px ${(W - x(t)).toFixed(1)}px -9px 0)`;
  };
  return { rest, move, x, set };
}

function drawBlock(layer, { a, b, c, key, lines, kind = "", look = "", marks = 0, pad = 7 }, x, y, h) {
  const w = x(b) - x(a);
  const thin = w < 4;
  const looks = `g.lk-block ${kind}${look}${thin ? " thin" : ""}`;
  const g = make(looks, layer, { style: `--c:${c}`, "data-b": key });
  const box = thin ? [x(a), max(1, w - 0.3), 0] : [x(a) + 0.7, max(1, w - 1.4), 3];
  make("rect", g, { x: box[0], y, width: box[1], height: h, rx: box[2] });
  const texts = lines.map(list => fit(list, w - pad)).filter(Boolean);
  const top = y + h / 2 + 10 - 6 * texts.length;
  for (let i = 0; i < marks; i++) make("path", g, { d: `M${x(a) + 2} ${y + 2.5 + 2.5 * i}h${max(0, w - 4)}` });
  texts.forEach((text, i) => make("text", g, { x: x(a) + w / 2, y: top + 12 * i, "text-anchor": "middle" }, text));
}

/** Frame the blocks that have this key. */
function mark(field, key) {
  for (const g of field.querySelectorAll("[data-b]")) g.classList.toggle("on", +g.dataset.b === key);
}

/** What a kind of scene provides if its clock runs through stops that its data tell. */
const onClock = {
  ...byStops,
  clocked: true,
  words: ({ run, state }) => `${seconds((state.t / TICKS) * run.duration_s)} of ${seconds(run.duration_s)}`,
  parts: ({ times }) => [[0, TICKS], "0", { snap: false, steps: times.length - 1 }],
  rate: step => max(TICKS / 12, (step || 0) / 0.7),
};

/** Times below the lanes. */
function axis(ui, { W, y }, duration_s, total_s) {
  const least = total_s / (W > 560 ? 7 : 4);
  const ten = 10 ** floor(log10(least));
  const step = ten * [1, 2, 5, 10].find(f => f * ten >= least);
  for (let k = 0, x; (x = ui.x(((k * step) / duration_s) * TICKS)) < W - 18; k++) {
    make("path.lk-stripe", ui.rest, { d: `M${x} ${y}v4` });
    const at = { x, y: y + 15, "text-anchor": k ? "middle" : "start" };
    make("text.lk-tiny", ui.rest, at, k ? short(k * step) : 0);
  }
}

export { lanes, axis, mark, onClock, TICKS, fit };
