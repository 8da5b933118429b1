"""The command line: one module a verb. Parse, call, render, exit code; no logic."""
