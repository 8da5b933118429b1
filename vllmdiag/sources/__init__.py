"""The only place that touches the machine, read-only; every source yields facts or Missing."""
