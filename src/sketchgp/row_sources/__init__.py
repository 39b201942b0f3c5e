"""Rows that stay where they are, on disk or in host memory, until they are needed.

``source`` has :class:`RowSource`, ``tables`` what it can read, ``ahead`` the thread that reads ahead.
"""

from .source import RowSource, ahead, blocks, is_source, whole_or_source, whole_targets

__all__ = ["RowSource", "ahead", "blocks", "is_source", "whole_or_source", "whole_targets"]
