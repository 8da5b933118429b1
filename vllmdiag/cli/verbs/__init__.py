"""One module a verb: `run` parses nothing and judges nothing, `EPILOG` holds the examples of its help."""
