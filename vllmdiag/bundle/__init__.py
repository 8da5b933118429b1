"""Evidence in files: bundles that vllmdiag wrote, and whatever else people paste; read, never executed or unpacked."""
