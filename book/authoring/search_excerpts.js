/* Under each page that the website's search finds, the place where the words stand. Sphinx would fetch the pages for
   that, which file:// does not allow: their texts come with search_texts.js, which wayfinding.py writes.
*/
const BEFORE = 60;
const LENGTH = 200;

const query = new URLSearchParams(window.location.search).get("q") || "";
const words = query.toLowerCase().split(/[\s"]+/).filter(Boolean);

/** Where a text is quoted: at the whole query, else at the longest of its words that is there; null if none is. */
function placeIn(text) {
  const low = text.toLowerCase();
  for (const word of [words.join(" "), ...[...words].sort((a, b) => b.length - a.length)]) {
    const at = low.indexOf(word);
    if (word && at >= 0) return at;
  }
  return null;
}

/** A paragraph with the text around its first match, or its beginning, and the words marked. */
function excerpt(text) {
  const at = placeIn(text);
  const from = at === null || at < BEFORE ? 0 : text.indexOf(" ", at - BEFORE) + 1;
  const cut = text.slice(from, from + LENGTH);
  const to = from + cut.length < text.length ? cut.lastIndexOf(" ") : cut.length;
  const paragraph = document.createElement("p");
  paragraph.className = "context";
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const shown = `${from ? "… " : ""}${cut.slice(0, to)} …`;
  for (const part of shown.split(new RegExp(`(${escaped.join("|")})`, "i"))) {
    const node = words.includes(part.toLowerCase()) ? document.createElement("mark") : document.createElement("span");
    node.textContent = part;
    paragraph.append(node);
  }
  return paragraph;
}

const results = document.getElementById("search-results");
if (results && words.length) {
  new MutationObserver(() => {
    for (const item of results.querySelectorAll("li:not(:has(.context))")) {
      const page = item.querySelector("a").getAttribute("href").replace(/\.html.*/, "");
      if (SEARCH_TEXTS[page]) item.append(excerpt(SEARCH_TEXTS[page]));
    }
  }).observe(results, { childList: true, subtree: true });
}
