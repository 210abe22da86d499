"""File formats: what other tools write of agent runs, read into spans and scores.

Place in the flow: ``framing`` cuts a stream of bytes into records, ``detect`` finds the format of a record by its content,
one module a format turns the record into spans (and scores that somebody gave). ``spanloop import`` and ``spanloop
assemble`` share all of it. A new format is a new file with ``NAME``, ``matches`` and ``read`` plus one line in
``detect.FORMATS``.

Invariants: a record is read on its own, never with its neighbours, so that splitting, repeating or reordering a file
changes nothing; ids are functions of content; a bad record costs only itself.
"""
