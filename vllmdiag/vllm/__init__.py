"""What vLLM looks like from outside, by version: the only place where a name or number of vLLM stands."""
