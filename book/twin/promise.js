/* The twin of book/promise.py: what a collective starts from and must end in, by rank r, chunk c and contribution k. */
(() => {
  const ROOT = 0;

  /**
   * @typedef {object} Promise_
   * @property {string} name
   * @property {string} says                          the goal in words
   * @property {(n: number) => Element} start         for n ranks: how often rank k's data is in chunk c of rank r
   * @property {(n: number) => Element} goal
   * @property {(n: number) => Place} where           which (rank, chunk) the goal is about
   * @property {(n: number) => (r: number, c: number) => number} source_chunk   which chunk the data must come from
   *
   * @typedef {(r: number, c: number, k: number) => number | boolean} Element
   * @typedef {(r: number, c: number) => boolean} Place
   */

  const ownData = () => (r, c, k) => r === k;
  const allData = () => () => 1;
  const rootData = () => (r, c, k) => k === ROOT;
  const everywhere = () => () => true;
  const onRoot = () => r => r === ROOT;
  /** Chunk c starts on rank c, goes to the right, and is complete after N-1 steps: on rank c-1. */
  const afterARing = n => (r, c) => r === (c + n - 1) % n;
  const onTheirRanks = n => (r, c) => r === c % n;

  /** A rank's own data, in the chunks that `where` names. */
  const ownDataWhere = where => n => (r, c, k) => r === k && where(n)(r, c);
  /** Every chunk holds the data of the rank that owns it, on whichever rank it is. */
  const dataOf = owned => n => (r, c, k) => owned(n)(k, c);

  const sameChunk = () => (r, c) => c;
  const chunkForThisRank = n => (r, c) => r + Math.floor(c / n) * n;

  const complete = "every rank holds every chunk complete";
  const rootsData = ownDataWhere(onRoot);
  const theirs = ownDataWhere(onTheirRanks);
  const ofTheirs = dataOf(onTheirRanks);

  const rows = [
    ["all_reduce", complete, ownData, allData, everywhere],
    ["reduce_scatter", "every chunk is complete on one rank", ownData, allData, afterARing],
    ["all_gather", complete, ownDataWhere(afterARing), dataOf(afterARing), everywhere],
    ["broadcast", `every rank holds rank ${ROOT}'s data`, rootsData, rootData, everywhere],
    ["scatter", `every rank holds its chunk of rank ${ROOT}'s data`, rootsData, rootData, onTheirRanks],
    ["gather", `rank ${ROOT} holds a chunk of every rank's data`, theirs, ofTheirs, onRoot],
    ["reduce", `rank ${ROOT} holds every chunk complete`, ownData, allData, onRoot],
    ["all_to_all", "every rank holds a chunk of every rank's data", ownData, ofTheirs, everywhere, chunkForThisRank],
  ];

  /** @type {Object<string, Promise_>} */
  const PROMISES = {};
  for (const [name, says, start, goal, where, source_chunk = sameChunk] of rows) {
    PROMISES[name] = { name, says, start, goal, where, source_chunk };
  }

  (globalThis.lockstepTwin ??= {}).promise = { ROOT, PROMISES };
})();
