"""What the target itself last thought would follow each token: two arrays of the vocabulary's size.

The target's most probable next tokens after every row that it verifies, accepted or not, are kept
for the token of that row, in place of those of its last occurrence. Arrays, so that looking up and
forgetting cost the same at any vocabulary: k = 10 takes 80 bytes a token, 12 MB at 150,000.
"""

import numpy as np

Successions = tuple[list[int], list[float]]
"""Tokens that may follow one, most probable first, and how probable each is."""


class Successors:
    """For each of V tokens the `k` likeliest successors, most probable first, and how probable.

    tokens: (V, k) int32; probabilities: (V, k) float32; 0 where nothing is known.
    """

    def __init__(self, vocabulary: int, k: int):
        self.tokens = np.zeros((vocabulary, k), dtype=np.int32)
        self.probabilities = np.zeros((vocabulary, k), dtype=np.float32)
        self.known: set[int] = set()

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.probabilities.nbytes

    def update(self, ids: list[int], tokens: np.ndarray, probabilities: np.ndarray) -> None:
        """n tokens were followed by (n, k) tokens with these probabilities; of equal ones among
        `ids` the last counts."""
        self.tokens[ids], self.probabilities[ids] = tokens, probabilities
        self.known.update(ids)

    def of(self, token: int) -> Successions:
        """Up to k successors, and their probabilities.

        >>> store = Successors(4, 2)
        >>> store.update([3], np.array([[1, 2]]), np.array([[0.5, 0.25]]))
        >>> store.of(3), store.of(0)
        (([1, 2], [0.5, 0.25]), ([], []))
        """
        if token not in self.known:
            return [], []
        return self.tokens[token].tolist(), self.probabilities[token].tolist()
