/* One cluster through the book: what a reader has chosen of it stands in the page's address, #cluster=ranks:16,..., and
   links to other pages take it along. Nothing is kept elsewhere, so that copying the address shares it. */
(() => {
  const SHARED = ["ranks", "latency_s", "bandwidth_bytes_per_s", "slow_link", "slow_rank"];
  const MARK = "#cluster=";
  // In JupyterLab the address is not the reader's to share.
  const here = !document.querySelector("[data-jp-theme-light]");
  const heard = new Set();

  /** What the address says: a number for each name; what is no positive number is left out. */
  function cluster() {
    if (!here || !location.hash.startsWith(MARK)) return {};
    const parts = location.hash.slice(MARK.length).split(",");
    const pairs = parts.map(part => part.split(":")).map(([name, text]) => [name, Number(text)]);
    return Object.fromEntries(pairs.filter(([name, x]) => SHARED.includes(name) && x > 0 && x < Infinity));
  }

  /** Write some values, or with null none at all, into the address, and tell the other figures of the page. */
  function choose(values, from) {
    if (!here) return;
    const now = values && { ...cluster(), ...values };
    const text = now ? MARK + SHARED.filter(name => name in now).map(name => `${name}:${now[name]}`) : "";
    if (text === location.hash) return;
    history.replaceState(history.state, "", text || location.pathname + location.search);
    for (const tell of heard) if (tell !== from) tell();
  }

  /** The place, among values in order, of the nearest one, by its ratio. */
  function nearest(values, x) {
    const far = values.map(value => Math.abs(Math.log(value / x)));
    return far.indexOf(Math.min(...far));
  }

  /** Call `tell` when another figure, or the reader in the address, has changed the cluster; returns what ends that. */
  function listen(tell) {
    heard.add(tell);
    addEventListener("hashchange", tell);
    return () => {
      heard.delete(tell);
      removeEventListener("hashchange", tell);
    };
  }

  /** A link to another page of the book takes the cluster along, unless it leads to a place in it. */
  function carry(e) {
    const link = e.target.closest?.("a[href]");
    if (!link || !location.hash.startsWith(MARK)) return;
    const to = new URL(link.href, location.href);
    const same = to.origin === location.origin && to.protocol === location.protocol;
    if (same && to.pathname.endsWith(".html") && to.pathname !== location.pathname && !to.hash) {
      link.href = to.href + location.hash;
    }
  }
  if (here && !globalThis.lockstepCluster) addEventListener("click", carry, true);

  globalThis.lockstepCluster = { SHARED, cluster, choose, nearest, listen };
})();
