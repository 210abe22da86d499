"""Files into the log: ``importing`` appends what ``spanloop.pipeline.formats`` reads, ``checkpoints`` lets it go on where it
stopped, ``showing`` says how far it is."""
