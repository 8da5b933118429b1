"""A miniature vLLM of real processes, the faults that can be put into it, and the check that `diagnose` names each.

`vllmdiag.lab.vllm` is the miniature. Its modules, classes and functions stand where those of the real one stand,
because a stack says no more than ``function (file)``: what `diagnose` knows of vLLM holds for the miniature as it is,
and nothing there has a special case for the lab. Everything else in this room starts it, breaks it, looks at it and
cleans up.
"""
