"""Several devices and machines: the same program on every rank of a ``torch.distributed`` process group, the work and
the large arrays shared out by rows.  ``with sketchgp.distributed.sharded():`` is all that a user writes.
"""

from .block import in_force, sharded
from .exchange import RankError
from .shards import Shards, of_rank_0

__all__ = [
    "RankError",
    "Shards",
    "in_force",
    "of_rank_0",
    "sharded",
]
