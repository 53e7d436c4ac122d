"""Names for the content of a cache block: keys that are equal exactly if everything that the content depends on is equal.

Pure. Knows no pools and no blocks, only token ids.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 16  # nobody finds two different prefixes with one key


def block_keys(token_ids: Sequence[int], block_size: int, *, sees_next: bool, before: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of the full blocks of a sequence that begins with ``token_ids``, in order, behind the known ``before``.

    The key of a block covers all tokens up to its end: keys are equal only where whole prefixes are. ``sees_next``: an
    entry depends on the token behind its position too (that of a draft layer does), so the key covers one token more, and
    a block whose next token is not known has none.
    """
    behind = int(sees_next)
    num_keys = max(len(token_ids) - behind, 0) // block_size
    keys = list(before)
    for number in range(len(keys), num_keys):
        ids = array("i", token_ids[number * block_size : (number + 1) * block_size + behind])
        if sys.byteorder == "big":
            ids.byteswap()
        last = keys[-1] if keys else b""
        keys.append(blake2b(last + ids.tobytes(), digest_size=_KEY_BYTES).digest())
    return keys
