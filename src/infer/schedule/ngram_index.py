"""`NgramIndex`: where each n-gram is in one sequence's tokens; `Guesses`: how proposals have fared

Both belong to one sequence and grow with it: nothing is searched from the beginning again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

READ_PER_STEP = 2048
"""Maximum number of a sequence's tokens that are read into its index in one step."""
MAX_CANDIDATES = 8
"""Maximum number of earlier places that are compared for the longest match."""
FORGET = 0.9
"""Factor of the weight of earlier verifications in a sequence's acceptance."""
MIN_PAUSE = 8
"""Number of steps for which a sequence is not proposed for after proposals stopped to pay."""
MAX_PAUSE = 1024
"""Maximum of that number."""


class NgramIndex:
    """The places of each n-gram in one sequence's tokens; it grows with the sequence."""

    def __init__(self, least: int, most: int) -> None:
        """`least`, `most`: numbers of tokens that an earlier place must, and need, have in common
        with the end."""
        self._least, self._most = least, most
        self._latest: dict[int, int] = {}
        """Hash of `least` tokens → end of the latest place that has them."""
        self._earlier: list[int] = []
        """For each end: the end of the place before it with the same hash; 0: none."""

    def read(self, tokens: Seq[int], limit: int = READ_PER_STEP) -> bool:
        """Add up to `limit` places of tokens that were appended; returns whether all are added."""
        begin = len(self._earlier)
        end = min(len(tokens), begin + limit)
        latest, least = self._latest, self._least
        for at in range(begin, end):  # a place ends before `at`, so a token follows it
            if at < least:
                self._earlier.append(0)
                continue
            key = hash(tuple(tokens[at - least : at]))
            self._earlier.append(latest.get(key, 0))
            latest[key] = at
        return end == len(tokens)

    def propose(self, tokens: Seq[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed the latest of the places with the longest match.

        A place near the end is taken as the beginning of a repetition.
        """
        start = self.find(tokens, tokens)
        if not start:
            return ()
        period = len(tokens) - start
        return tuple([tokens[start + i % period] for i in range(count)])

    def find(self, text: Seq[int], tokens: Seq[int]) -> int:
        """End of the latest of the places in `text`, which was read, with the longest match with
        the end of `tokens`; 0 if there is none."""
        num, least = len(tokens), self._least
        if num < least:
            return 0
        start = self._latest.get(hash(tuple(tokens[num - least :])), 0)
        best, best_length = 0, least - 1
        for _ in range(MAX_CANDIDATES):
            if not start:
                break
            length, limit = 0, min(self._most, start, num)
            while length < limit and text[start - 1 - length] == tokens[num - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = start, length
                if length == self._most:
                    break
            start = self._earlier[start]
        return best


class Prediction:
    """A text that a caller expects, as a source of proposals."""

    def __init__(self, tokens: tuple[int, ...], least: int, most: int) -> None:
        """`tokens`: of the text; `least`, `most`: as in `NgramIndex`."""
        self._tokens, self._least = tokens, least
        self._index = NgramIndex(least, most)
        self.num_accepted = 0
        """Tokens of it that were proposed and are part of the answer."""
        self.num_rejected = 0
        """Tokens of it that were proposed and are not."""

    def propose(self, tokens: Seq[int], num_output: int, count: int) -> tuple[int, ...]:
        """Up to `count` tokens of the text that follow where the sequence is in it.

        `tokens`: of the sequence, the last `num_output` of which are output. Before there is enough
        output to look for, the text is expected to be followed from its beginning.
        """
        text = self._tokens
        if not self._index.read(text):
            return ()
        if num_output < self._least:
            output = tuple(tokens[len(tokens) - num_output :])
            start = num_output if text[:num_output] == output else 0
        else:
            start = self._index.find(text, tokens)
        return text[start : start + count] if start else ()

    def record(self, num_proposed: int, num_kept: int) -> None:
        """Count proposed tokens, of which the answer has got `num_kept`."""
        self.num_accepted += num_kept
        self.num_rejected += num_proposed - num_kept


class Acceptance:
    """An estimate of the probability that a proposed token is accepted, from recent tokens."""

    def __init__(self, first: float = 1.0) -> None:
        """`first`: estimate before any token was tested."""
        self._hits, self._trials = first, 1.0

    @property
    def rate(self) -> float:
        """The estimate, 0 to 1."""
        return self._hits / self._trials

    def record(self, num_tested: int, num_accepted: int) -> None:
        """Learn from tokens that were compared with sampled ones."""
        self._hits = FORGET**num_tested * self._hits + num_accepted
        self._trials = FORGET**num_tested * self._trials + num_tested


class Guesses:
    """What is known about one sequence's proposals."""

    def __init__(
        self, index: NgramIndex, prediction: Prediction | None = None, acceptance: float = 1.0
    ) -> None:
        """`index`: of the sequence's own tokens; `prediction`: what its caller expects.
        `acceptance`: estimate before any token was tested; 1, so that a sequence is tried."""
        self.index = index
        self.prediction = prediction
        self._is_predicted = False
        self.num_proposed = 0
        """Tokens proposed so far."""
        self.num_accepted = 0
        """Tokens of them that were accepted and are part of the answer."""
        self._accepted = Acceptance(acceptance)
        self._pause = self._left = 0

    def propose(self, tokens: Seq[int], num_output: int, count: int) -> tuple[int, ...]:
        """Up to `count` tokens, from the prediction if it has any, else from the index."""
        return self.propose_predicted(tokens, num_output, count) or self.index.propose(
            tokens, count
        )

    def propose_predicted(self, tokens: Seq[int], num_output: int, count: int) -> tuple[int, ...]:
        """Up to `count` tokens from the prediction; none without one, or where it has none."""
        text = self.prediction
        proposed = () if text is None else text.propose(tokens, num_output, count)
        self._is_predicted = bool(proposed)
        return proposed

    @property
    def acceptance(self) -> float:
        """Estimated probability that a proposed token is accepted if those before it are."""
        return self._accepted.rate

    def is_paused(self) -> bool:
        """Count a step of a pause; returns whether there is one."""
        self._left = max(0, self._left - 1)
        return self._left > 0

    def pause(self) -> None:
        """Begin a pause, twice as long as the one before. After it one token is tried."""
        self._pause = min(MAX_PAUSE, max(MIN_PAUSE, 2 * self._pause))
        self._left = self._pause

    @property
    def is_on_trial(self) -> bool:
        """Whether proposals did not pay when they were last made."""
        return self._pause > 0

    def record(self, num_proposed: int, num_accepted: int, num_kept: int) -> None:
        """Learn from a verified proposal. `num_kept`: accepted tokens that the sequence got before
        it ended."""
        self.num_proposed += num_proposed
        self.num_accepted += num_kept
        if self.prediction is not None and self._is_predicted:
            self.prediction.record(num_proposed, num_kept)
        # The tokens behind the first rejected one were not tested.
        self._accepted.record(min(num_proposed, num_accepted + 1), num_accepted)
        if num_accepted == num_proposed:
            self._pause = 0
