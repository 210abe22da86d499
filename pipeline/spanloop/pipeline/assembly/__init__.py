"""Assembly: from operations to orchestrations, blind to dialects.

join (which traces belong together) -> tree (parents, cycles, gaps) -> calls (model calls) -> delegations ->
infer (events) -> edges -> revise (content, completeness) -> stage (the reducer that runtimes carry).
"""
