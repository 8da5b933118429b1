"""Snapshot in, Diagnosis out. Pure: no clock, no I/O, no pid looked up."""
