"""L2: the text that the book's models learn, character by character, cut into windows.

Shapes: N characters in the text, T tokens in a window.
"""
from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import torch
from torch.utils.data import Dataset

STORY = "counting_house.txt"


def load_text() -> str:
    """The story that ships with the book, written for it: some 8,000 characters of plain ASCII."""
    return files(__package__).joinpath(STORY).read_text("ascii")


class Characters:
    """A tokenizer with one token for each character that `text` uses, in alphabetical order."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("an empty text has no characters to make tokens of: give the text to be learned")
        self.alphabet = "".join(sorted(set(text)))
        self._numbers = {character: number for number, character in enumerate(self.alphabet)}

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; they are numbered from 0."""
        return len(self.alphabet)

    def encode(self, text: str) -> torch.Tensor:
        """Characters -> token numbers (N,), int64. Raises ValueError for a character that has no token."""
        if unknown := sorted(set(text) - self._numbers.keys()):
            raise ValueError(f"no token for {', '.join(map(repr, unknown))}: "
                             f"encode only characters of the text that the tokenizer was made from")
        return torch.tensor([self._numbers[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor | Sequence[int]) -> str:
        """Token numbers (N,) -> characters. Raises ValueError for an invalid token number, or for several rows."""
        numbers = torch.as_tensor(tokens)
        if numbers.dim() != 1:
            raise ValueError(f"tokens of shape {tuple(numbers.shape)} are not a single text: decode one row at a time")
        if wrong := [number for number in numbers.tolist() if not 0 <= number < self.vocab_size]:
            raise ValueError(f"{wrong[0]} is not a token: they are numbered from 0 to {self.vocab_size - 1}")
        return "".join(self.alphabet[number] for number in numbers.tolist())


class Windows(Dataset):
    """Consecutive, non-overlapping windows of a text: item i is (inputs, targets), each (T,) and int64.

    The target of each input token is the token after it, so targets are the inputs shifted by one. There are (N-1) // T
    items; the few tokens after the last full window are left out. Raises ValueError for a text with fewer than T + 1
    tokens.
    """

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        if not isinstance(tokens, torch.Tensor):
            raise TypeError(f"windows are cut from a tensor of token numbers, not from a {type(tokens).__name__}: "
                            f"encode the text with `Characters` first")
        if context < 1:
            raise ValueError(f"context is {context}, but a window needs at least 1 token")
        if tokens.dim() != 1 or len(tokens) < context + 1:
            raise ValueError(f"windows of {context} tokens need a row of at least {context + 1} tokens, "
                             f"but these have the shape {tuple(tokens.shape)}")
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = range(len(self))[index] * self.context  # raises IndexError when out of range, as a list does
        stretch = self.tokens[start:start + self.context + 1]
        return stretch[:-1], stretch[1:]
