"""What changes something on the machine: opt-in, checked again at the last moment, never part of a diagnosis."""
