"""PrefixIndex: finds full KV blocks by what they hold, so that a prompt's known beginning is not computed again.

A block's key is a keyed hash of its tokens and of its parent's key: equal keys mean equal contexts from the first token
on. The tokens are compared all the same, so that not even a forged collision reads another's memory.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from headway.core.batch import Ints

KEY_BYTES = 16


class PrefixIndex:
    """Keys to blocks, and the blocks nobody holds in the order in which they were last used.

    `secret`: the hash's key; who does not know it cannot aim at another's blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, secret: bytes = b"") -> None:
        self.block_size = block_size
        self._secret = secret
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()

    def root(self, salt: str) -> bytes:
        """The parent of a first block: requests with different salts share nothing."""
        return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, key=self._secret).digest()

    def key(self, parent: bytes, tokens: Ints) -> bytes:
        """The key of a full block, tokens int32[block_size]."""
        return hashlib.blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES, key=self._secret).digest()

    def find(self, key: bytes, tokens: Ints) -> int | None:
        """The block that holds these tokens in this context."""
        block = self._block_of.get(key)
        if block is None or not np.array_equal(self._tokens[block], tokens):
            return None
        return block

    def put(self, key: bytes, block: int, tokens: Ints) -> None:
        """Block now holds these tokens. Of two with the same content the first is remembered."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._tokens[block] = tokens

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    # -- blocks that nobody holds --------------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> Iterable[int]:
        return self._idle

    def rest(self, block: int) -> None:
        """Nobody holds the block any more; it is the last to be forgotten."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """Somebody holds the block again."""
        del self._idle[block]

    def forget(self) -> int:
        """Gives up the block that has rested longest, and names it."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
