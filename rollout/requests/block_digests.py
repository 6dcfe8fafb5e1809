"""Name a block of tokens: by a digest of its tokens and of all that come before them.

Invariants
----------
* Equal digests mean equal tokens from position 0 on, under one salt and one adapter. The key is this cache's own, or
  the secret of its fleet, so no caller can prepare two prompts that collide; a hit compares the tokens all the same.
* They mean equal images, too: a block in which images begin is named behind their digests, and so all that follow it.
* Only full blocks have a digest, and each is computed once: a chain is kept and extended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from samebit.rollout.keys.digest_key import DigestKey
from samebit.rollout.requests.images import PromptImages

DIGEST_BYTES = 16
_TOKEN = np.dtype(np.int32)
_NO_MARKS: Mapping[int, bytes] = MappingProxyType({})


class PromptDigests(NamedTuple):
    """Names a prompt's blocks. root: what the first one follows. blocks: the digests of the full ones. marks: by the
    number of a block those of the images that begin in it."""

    root: bytes
    blocks: list[bytes]
    marks: Mapping[int, bytes] = _NO_MARKS


class ChainHasher:
    """Names blocks by keyed BLAKE2b, 128 bits, chained over blocks of `block_size` tokens."""

    def __init__(self, block_size: int, key: DigestKey | None = None) -> None:
        self.block_size = block_size
        self._key = (DigestKey() if key is None else key).reveal()
        self._keyed = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES)

    def root(self, cache_salt: str | None, adapter: int = 0) -> bytes:
        """Return what the first block under this salt and the adapter of this number follows; 0 for no adapter."""
        salt = ("" if cache_salt is None else cache_salt).encode(errors="surrogatepass")
        person = adapter.to_bytes(hashlib.blake2b.PERSON_SIZE, "little")
        return hashlib.blake2b(salt, key=self._key, digest_size=DIGEST_BYTES, person=person).digest()

    def prompt(
        self,
        cache_salt: str | None,
        tokens: npt.NDArray[np.int64],
        adapter: int = 0,
        images: PromptImages | None = None,
    ) -> PromptDigests:
        """Name the full blocks of a prompt."""
        root = self.root(cache_salt, adapter)
        if images is None:
            return PromptDigests(root, self.extend(root, tokens))
        marks = images.marks(self.block_size)
        return PromptDigests(root, self.extend_marked(root, tokens, 0, marks), marks)

    def whole(self, named: PromptDigests, tokens: npt.NDArray[np.int64]) -> bytes:
        """Name a prompt with all of its tokens, those behind its full blocks too."""
        last = self._marked(named.blocks[-1] if named.blocks else named.root, named.marks.get(len(named.blocks)))
        rest = tokens[len(named.blocks) * self.block_size :].astype(_TOKEN).tobytes()
        return hashlib.blake2b(last + rest, key=self._key, digest_size=DIGEST_BYTES, person=b"whole").digest()

    def extend(self, parent: bytes, tokens: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the digests of the full blocks among `tokens`, which follow the block `parent`."""
        width = self.block_size * _TOKEN.itemsize
        data = tokens.astype(_TOKEN).tobytes()
        digests: list[bytes] = []
        for at in range(0, len(data) - width + 1, width):
            named = self._keyed.copy()  # a third faster than with the key anew
            named.update(parent + data[at : at + width])
            parent = named.digest()
            digests.append(parent)
        return digests

    def extend_marked(
        self, parent: bytes, tokens: npt.NDArray[np.int64], first: int, marks: Mapping[int, bytes]
    ) -> list[bytes]:
        """Do as `extend` where images begin in some blocks, of which `first` is the first one's number."""
        digests: list[bytes] = []
        for number, at in enumerate(range(0, len(tokens) - self.block_size + 1, self.block_size), first):
            marked = self._marked(parent, marks.get(number))
            digests += self.extend(marked, tokens[at : at + self.block_size])
            parent = digests[-1]
        return digests

    def _marked(self, parent: bytes, mark: bytes | None) -> bytes:
        """Return what a block follows in which images of these digests begin."""
        if mark is None:
            return parent
        return hashlib.blake2b(parent + mark, key=self._key, digest_size=DIGEST_BYTES, person=b"images").digest()


class TokenChain:
    """Holds the digests of a sequence's full blocks, as far as they were needed.

    Those of the prompt are shared by all samples of a request.
    """

    __slots__ = ("_hasher", "_marks", "_own", "_prompt", "_root")

    def __init__(self, hasher: ChainHasher, prompt: PromptDigests) -> None:
        self._hasher = hasher
        self._root, self._prompt, self._marks = prompt
        self._own: list[bytes] = []

    def __len__(self) -> int:
        return len(self._prompt) + len(self._own)

    def __getitem__(self, index: int) -> bytes:
        split = len(self._prompt)
        return self._prompt[index] if index < split else self._own[index - split]

    def head(self, count: int) -> list[bytes]:
        """Return the first `count` digests, or as many as are known."""
        return self._prompt[:count] + self._own[: max(0, count - len(self._prompt))]

    def beyond(self, start: int) -> list[bytes]:
        """Return the digests from block `start` on."""
        return self._prompt[start:] + self._own[max(0, start - len(self._prompt)) :]

    def cover(self, tokens: npt.NDArray[np.int64]) -> None:
        """Extend the chain to all full blocks of these tokens, the sequence's own from position 0 on."""
        size = self._hasher.block_size
        known = len(self)
        full = len(tokens) // size
        if full > known:
            parent = self[known - 1] if known else self._root
            new = tokens[known * size : full * size]
            if self._marks:
                self._own += self._hasher.extend_marked(parent, new, known, self._marks)
            else:
                self._own += self._hasher.extend(parent, new)
