"""Rows that stay where they are, on disk or in host memory, until they are needed.

``source`` has :class:`RowSource` and the thread that reads ahead, ``tables`` what can be read.
"""

from .source import RowSource, ahead, blocks, whole_or_source, whole_targets

__all__ = ["RowSource", "ahead", "blocks", "whole_or_source", "whole_targets"]
