"""The miniature: each module stands where its model stands in vLLM 0.32, with the same classes, functions and threads.

What it has of the real one: the processes and their titles, the threads, the sockets with their patterns and paths, the
start-up handshake, the rings with their geometry (by `vllmdiag.refqueue`), a step of two messages, collectives that
wait for all ranks, and HTTP with streaming. What it has not: torch, a model, a GPU. A "token" is a short word.
"""
