"""offline.py MODEL TP READY_FILE: the LLM class in a user's script, without an API server; idles until it is killed."""

from __future__ import annotations

import pathlib
import signal
import sys


def main() -> None:
    """Answer one prompt, say so by creating READY_FILE, wait."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model, tensor_parallel, ready = sys.argv[1:4]
    llm = LLM(
        model,
        load_format="dummy",
        tensor_parallel_size=int(tensor_parallel),
        max_model_len=2048,
        enforce_eager=True,
    )
    llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True))
    pathlib.Path(ready).touch()
    while True:
        signal.pause()


if __name__ == "__main__":  # spawned children import this file again
    main()
