"""See `vllmdiag.lab.vllm`."""
