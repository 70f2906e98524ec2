"""vLLM itself, from the environment of `make engine-vllm`, on a machine without a GPU: `pytest -m vllm`."""
