/* The twin of book/cost/network.py: nodes whose ranks share network cards, and what a message passes on its way. */
(() => {
  const { Link } = globalThis.lockstepTwin.links;

  /** Nodes of `ranks_per_node` ranks each, whose ranks share the node's cards, each way, with all that pass there. */
  class Network {
    /**
     * @param {number} ranks_per_node
     * @param {Link} inside               between two ranks of a node, for each message alone
     * @param {Link} across               to another node; its bandwidth is that of a card
     * @param {number} cards_per_node
     * @param {number} switch_bytes_per_s   what all messages between nodes can have together
     */
    constructor(ranks_per_node, inside, across, cards_per_node = 1, switch_bytes_per_s = Infinity) {
      if (!(ranks_per_node >= 1 && cards_per_node >= 1 && cards_per_node <= ranks_per_node)) {
        throw new RangeError(`a node of ${ranks_per_node} ranks can't have ${cards_per_node} cards`);
      }
      if (!(switch_bytes_per_s > 0)) {
        throw new RangeError(`switch_bytes_per_s must be positive, not ${switch_bytes_per_s}`);
      }
      if (!(inside instanceof Link && across instanceof Link)) throw new RangeError("inside and across must be links");
      Object.assign(this, { ranks_per_node, inside, across, cards_per_node, switch_bytes_per_s });
    }

    /** The node that a rank sits on. */
    node_of(rank) {
      return Math.floor(rank / this.ranks_per_node);
    }

    /** Whether two ranks sit on different nodes. */
    crosses(src, dst) {
      return this.node_of(src) !== this.node_of(dst);
    }

    /** The number of the card that a rank uses, counted through all nodes. */
    card_of(rank) {
      const at = rank % this.ranks_per_node;
      return this.node_of(rank) * this.cards_per_node + Math.floor((at * this.cards_per_node) / this.ranks_per_node);
    }

    /** The link that a message from `src` to `dst` takes. */
    link(src, dst) {
      return this.crosses(src, dst) ? this.across : this.inside;
    }

    /**
     * What messages pass on their way, a card out, a card in and the switch, as numbers into the second list: the bytes
     * per second of each of these. Inside a node it is three times the first one, which can carry anything.
     */
    routes(messages) {
      const cards = 1 + Math.max(-1, ...messages.map(({ src, dst }) => Math.max(this.card_of(src), this.card_of(dst))));
      const passed = messages.map(({ src, dst }) => {
        return this.crosses(src, dst) ? [2 + this.card_of(src), 2 + cards + this.card_of(dst), 1] : [0, 0, 0];
      });
      return [passed, [Infinity, this.switch_bytes_per_s, ...Array(2 * cards).fill(this.across.bandwidth_bytes_per_s)]];
    }
  }

  globalThis.lockstepTwin.network = { Network };
})();
