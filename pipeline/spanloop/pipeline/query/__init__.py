"""The read side's SQL: views and macros over archive and live tail, run in a process that can do nothing else.

``session`` (this side) asks ``plan`` which files a statement needs and starts ``sandbox`` (the other side), which shuts itself
in with ``guards`` and renders with ``render``; ``cli`` is ``spanloop query``. Import from the modules: this package stays
empty so that the sandbox starts with nothing but DuckDB.
"""
