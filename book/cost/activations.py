"""L1: the bytes that a transformer layer keeps for its backward."""
from __future__ import annotations

from dataclasses import dataclass

RECOMPUTE = (None, "selective", "half", "full")


def check_recompute(recompute: str | None) -> None:
    """Raises ValueError for what is not in RECOMPUTE."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute can't be {recompute!r}: use None, 'selective', 'half' or 'full'")


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a transformer layer: sequences b, tokens in each s, width h, heads a; its MLP is 4 h wide.

    Another kind of layer says what it keeps for each of the s b h numbers of its input: bytes between attention and
    MLP (10 with dropout), inside them (24), and of scores (5 a s/h, which stands for None).
    """

    num_sequences: int
    num_tokens: int
    width: int
    num_heads: int
    outside_bytes: float = 10
    inside_bytes: float = 24
    score_bytes: float | None = None

    @property
    def num_activations(self) -> int:
        """Numbers in what goes from layer to layer: s b h."""
        return self.num_sequences * self.num_tokens * self.width


def activation_bytes(layer: LayerShape, group_size: int = 1, sequence_parallel: bool = False,
                     regather: bool = False, recompute: str | None = None) -> float:
    """Bytes that a transformer layer keeps on each of t ranks for its backward, in 16 bits (korthikanti2022, table 2).

    s b h (10 + 24/t + 5 a s/(h t)), which is 34 + 5 a s/h on one rank. With sequence parallelism 4 + 30/t in place of
    10 + 24/t, for the norms' outputs are kept gathered (derived); with `regather`, which is the table's row, all of it
    is over t. `recompute` is None, "selective" (no 5 a s/h), "full" (the layer's input alone: 2 s b h, over t with
    sequence parallelism) or "half" (every second layer in full: the mean of None and "full"). Numbers have 2 bytes,
    dropout masks 1; attention keeps its scores; statistics of norms are left out.
    """
    check_recompute(recompute)
    if recompute == "half":
        return (activation_bytes(layer, group_size, sequence_parallel, regather)
                + activation_bytes(layer, group_size, sequence_parallel, regather, "full")) / 2
    if recompute == "full":
        return 2.0 * layer.num_activations / (group_size if sequence_parallel else 1)
    scores = layer.score_bytes
    if scores is None:
        scores = 5 * layer.num_heads * layer.num_tokens / layer.width
    whole = (0 if regather else 4) if sequence_parallel else layer.outside_bytes
    inside = layer.outside_bytes + layer.inside_bytes - whole + (0 if recompute else scores)
    return layer.num_activations * (whole + inside / group_size)


def gpt_activation_bytes(layer: LayerShape, group_size: int = 1, sequence_parallel: bool = False,
                         regather: bool = False, bytes_per_number: int = 4) -> float:
    """Bytes that a layer of the book's GPT keeps on each of t ranks for its backward, without dropout.

    s b h (4 + 12/t) numbers, plus 4 s b of the norms' statistics and a s b / t of attention's log-sum-exps (derived:
    two norms' inputs and two outputs; over t, q, k, v, what attention gives, and 4 + 4 in the MLP). Scores are not
    kept. With sequence parallelism only the norms' outputs, gathered, stay whole; with `regather` nothing does.
    """
    tokens = layer.num_sequences * layer.num_tokens
    gathered = 1 if regather else group_size  # of the norms' outputs, in shares of 1/t
    between = (2 + 2 * gathered if sequence_parallel else 4 * group_size) * layer.num_activations
    statistics = 4 * tokens * (1 if sequence_parallel else group_size)
    inside = 12 * layer.num_activations + layer.num_heads * tokens
    return (between + statistics + inside) / group_size * bytes_per_number
