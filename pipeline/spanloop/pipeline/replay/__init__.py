"""Replay: orchestrations, rewards, credit and samples made again from the archive, by the stream's own pure functions.

``reading`` (records to rows) <- ``joining`` (which traces belong together) <- ``spill`` (rows on disk by bucket) <-
``assembling`` (rows of one orchestration to its result) <- ``transforms`` (the same as Beam pipelines) <- ``driver`` (the
local run, bucket by bucket) <- ``cli``. ``results`` is what a replay leaves behind; ``diff`` and ``verify`` compare.
"""
