"""The running batch: it admits requests, samples a token for every row at each step, and drops finished rows if that
saves time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from enginehouse.errors import EnginehouseError
from enginehouse_torch.cache import KVCache
from enginehouse_torch.decoding_rows import DecodingRows
from enginehouse_torch.forward import Forward
from enginehouse_torch.requests import RequestProgress
from enginehouse_torch.sampling import draw, prompt_logprobs, uniforms

COMPACT_BELOW = 0.75  # fraction of rows alive below which copying the cache is cheaper than computing finished rows
FIRST_COLUMNS = 256  # free columns of a new cache; doubled as needed
LARGEST_LOGITS = 2**28  # elements of the logits of a scored prompt's chunk: 1 GiB in float32

Knobs = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Temperature, top-k and top-p of each row as arguments of `draw`; None if every row has the neutral value."""


@dataclass
class DecodingState:
    """Rows that are being decoded.

    Attributes:
        rows: the completions.
        cache: keys and values of all tokens of the rows except the last token of each.
        last: the last tokens, `(rows, 1)` int64.
        padding: number of leading padding columns of each row, `(rows,)` int64; None if no row has any.
        knobs: the rows' sampling parameters.
    """

    rows: DecodingRows
    cache: KVCache
    last: torch.Tensor
    padding: torch.Tensor | None
    knobs: Knobs


class RunningBatch:
    """Rows and their cache. Not thread-safe: only the decode loop touches it, under `torch.inference_mode`.

    A request may join at any token boundary. Its prompt is prefilled once, together with other prompts that are
    admitted at the same time. Then its rows and the running rows are copied into a new cache. The copy reads and writes
    the cache once, like a decode step, so a join at every step costs no more than a small multiple of the decoding.

    A forward pass of a prefill has at most `prefill_tokens` padded prompt tokens.
    """

    def __init__(
        self,
        forward: Forward,
        layers: int,
        device: torch.device,
        vocabulary: int,
        end_ids: tuple[int, ...],
        prefill_tokens: int,
    ):
        self._forward = forward
        self._layers = layers
        self._device = device
        self._end_ids = end_ids
        self._prefill_tokens = prefill_tokens
        self._score_tokens = max(1, min(prefill_tokens, LARGEST_LOGITS // vocabulary))
        self._live: DecodingState | None = None

    def __len__(self) -> int:
        """Return the number of completions being generated."""
        live = self._live  # read once: other threads ask too
        return 0 if live is None else int(live.rows.alive.sum())

    @property
    def tokens(self) -> int:
        """Number of tokens of the completions being generated, each with its prompt."""
        live = self._live
        return 0 if live is None else int((live.rows.prompt_tokens + live.rows.count)[live.rows.alive].sum())

    def requests(self) -> set[RequestProgress]:
        """Return the requests with a completion being generated."""
        return set() if self._live is None else set(self._live.rows.owner[self._live.rows.alive])

    def admit(self, admissions: Sequence[tuple[RequestProgress, int]], version: int) -> None:
        """Prefill each request, `(request, samples to begin)`, and sample the first token of its samples.

        A request that is only scored begins no sample and is completed here.
        """
        pieces = [] if self._live is None else [(self._live.rows, self._live.cache, np.arange(len(self._live.rows)))]
        for chunk in self._chunks(admissions):
            cache, logits = self._prefill([pending for pending, _ in chunk])
            for pending, count in chunk:
                if count == 0:
                    pending.complete_rest("length", version)
            samples = np.array([count for _, count in chunk])
            if samples.any():
                rows = DecodingRows.begin(
                    [(pending, count) for pending, count in chunk if count], self._end_ids, version
                )
                source = np.arange(len(chunk)).repeat(samples)
                logits = logits.index_select(0, torch.from_numpy(source).to(self._device))
                self._draw(rows, logits, self._knobs(rows), version)
                pieces.append((rows, cache, source))
        self._assemble(pieces)

    def step(self, version: int) -> None:
        """Sample one token for every completion; there must be at least one completion."""
        live = self._live
        if live is not None and (len(self) <= COMPACT_BELOW * len(live.rows) or live.cache.used == live.cache.capacity):
            self._assemble([(live.rows, live.cache, np.arange(len(live.rows)))])
            live = self._live
        if live is None:
            raise EnginehouseError("there is nothing to decode")
        logits = self._forward(live.last, live.padding, live.cache)[:, -1]
        live.last = self._draw(live.rows, logits, live.knobs, version)[:, None]
        if not live.rows.alive.any():
            self.clear()

    def abort(self, requests: Iterable[RequestProgress]) -> None:
        """Complete the rows of these requests with the tokens they have."""
        if self._live is None:
            return
        unwanted, rows = set(requests), self._live.rows
        rows.complete(rows.alive & np.array([owner in unwanted for owner in rows.owner]), "abort")
        if not rows.alive.any():
            self.clear()

    def recompute(self) -> None:
        """Compute the keys and values of all rows again, after the weights have changed."""
        live = self._live
        if live is None:
            return
        live.cache = KVCache(self._layers, 0)  # frees the old one
        rows = live.rows.take(np.flatnonzero(live.rows.alive)[np.argsort(-live.rows.cached[live.rows.alive])])
        pieces, begin = [], 0
        while begin < len(rows):  # longest first, so that a pass has rows of similar lengths
            end = begin + max(1, self._prefill_tokens // int(rows.cached[begin]))
            chunk = rows.take(np.arange(begin, min(end, len(rows))))
            cache, _, _ = self._forward_rows(chunk.cached_tokens(), all_logits=False)
            pieces.append((chunk, cache, np.arange(len(chunk))))
            begin = end
        self._assemble(pieces)

    def clear(self) -> None:
        """Forget all rows and free their cache."""
        self._live = None

    def _chunks(self, admissions: Sequence[tuple[RequestProgress, int]]) -> list[list[tuple[RequestProgress, int]]]:
        """Split requests into forward passes within the token budget.

        Prompts whose logprobs are requested get separate passes, because their logits are large.
        """
        chunks = []
        for scored, budget in ((True, self._score_tokens), (False, self._prefill_tokens)):
            chunk: list[tuple[RequestProgress, int]] = []
            longest = 0
            for pending, count in admissions:
                if pending.request.sampling.prompt_logprobs is not scored:
                    continue
                longest = max(longest, len(pending.prompt))
                if chunk and longest * (len(chunk) + 1) > budget:
                    chunks.append(chunk)
                    chunk, longest = [], len(pending.prompt)
                chunk.append((pending, count))
            if chunk:
                chunks.append(chunk)
        return chunks

    def _prefill(self, requests: Sequence[RequestProgress]) -> tuple[KVCache, torch.Tensor]:
        """Run the prompts, one row each; return their cache and the logits after them, `(requests, vocabulary)`."""
        scored = requests[0].request.sampling.prompt_logprobs
        cache, logits, tokens = self._forward_rows([pending.prompt for pending in requests], all_logits=scored)
        if scored:
            temperature = torch.tensor([p.request.sampling.temperature for p in requests], device=self._device)
            logprobs = prompt_logprobs(logits, tokens, temperature).tolist()
            for pending, row in zip(requests, logprobs, strict=True):
                pending.prompt_logprobs = [0.0, *row[cache.used - len(pending.prompt) + 1 :]]
        return cache, logits[:, -1]

    def _forward_rows(
        self, sequences: Sequence[np.ndarray], all_logits: bool
    ) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
        """Run whole sequences through the model, one row each.

        Returns:
            Their cache, the logits, and the tokens, `(rows, longest)` with padding on the left.
        """
        lengths = np.array([len(sequence) for sequence in sequences])
        longest = int(lengths.max())
        padded = np.zeros((len(sequences), longest), np.int64)
        for row, sequence in zip(padded, sequences, strict=True):
            row[longest - len(sequence) :] = sequence
        tokens = torch.from_numpy(padded).to(self._device)
        cache = KVCache(self._layers, longest)
        return cache, self._forward(tokens, self._pad(longest - lengths), cache, all_logits=all_logits), tokens

    def _assemble(self, pieces: Sequence[tuple[DecodingRows, KVCache, np.ndarray]]) -> None:
        """Build the batch from the rows alive in `pieces`: rows, a cache, and each row's index into the cache."""
        rows, cache_pieces = None, []
        for piece, cache, source in pieces:
            if not piece.alive.any():
                continue
            alive = piece.take(piece.alive)
            index = torch.from_numpy(source[piece.alive]).to(self._device)
            cache_pieces.append((cache, index, cache.used - int(alive.cached.max())))
            rows = alive if rows is None else DecodingRows.concat(rows, alive)
        if rows is None:
            return self.clear()
        used = int(rows.cached.max())
        spare = min(int((rows.limit - rows.count).max()), max(FIRST_COLUMNS, used))
        last = rows.tokens[np.arange(len(rows)), rows.count - 1]
        self._live = DecodingState(
            rows,
            KVCache.gather(cache_pieces, spare),
            torch.from_numpy(last).to(self._device)[:, None],
            self._pad(used - rows.cached),
            self._knobs(rows),
        )

    def _draw(self, rows: DecodingRows, logits: torch.Tensor, knobs: Knobs, version: int) -> torch.Tensor:
        """Sample and record a token for each row; return the tokens, `(rows,)` int64."""
        noise = torch.from_numpy(uniforms(rows.stream, rows.count)).to(self._device)
        tokens, drawn_logprobs = draw(logits, noise, *knobs)
        logprobs = drawn_logprobs.cpu().numpy()
        if not np.isfinite(logprobs[rows.alive]).all():
            raise EnginehouseError(f"the model's logits are not finite (weight version {version})")
        rows.record(tokens.cpu().numpy(), logprobs, version)
        return tokens

    def _knobs(self, rows: DecodingRows) -> Knobs:
        def tensor(column: np.ndarray, neutral: float) -> torch.Tensor | None:
            return None if (column == neutral).all() else torch.from_numpy(column).to(self._device)

        return tensor(rows.temperature, 1.0), tensor(rows.top_k, 0), tensor(rows.top_p, 1.0)

    def _pad(self, padding: np.ndarray) -> torch.Tensor | None:
        """Return the number of padding columns of each row, or None if no row has any."""
        return torch.from_numpy(padding).to(self._device) if padding.any() else None
