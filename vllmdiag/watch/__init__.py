"""Watching over time: rings sampled many times a second, stalls captured before a restart destroys the evidence."""
